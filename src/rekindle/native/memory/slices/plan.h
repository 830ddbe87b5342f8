// Plans how to compute the results of a sliced call: along which axis, and how much at once.
#pragma once

#include <cstdint>
#include <optional>

#include "../../base/types.h"
#include "../../ops/slicing.h"
#include "slice.h"
#include "sliced_call.h"

namespace rekindle {

// Return which slices along `axis` are possible, if there is one position only on the axes `fixed`.
AxisPlan axis_plan(const SlicedCall& call, int axis, AxisMask fixed = 0);
// Forget which slices are possible, because a trial has failed.
void note_failed_trial() noexcept;
// Return how the positions `box` of the result are computed.
SliceWay way_of(const SlicedCall& call, const Box& box);
// Return the result of `call` as a matrix: the axes from `axis` on make up the columns.
Geometry rows_of(const SlicedCall& call, int axis);
// Return which slices along `axis` the kernel of `call` computes as it computes the whole
// (`grain_of_kernel`), if there is one position only on the axes `fixed`.
std::optional<Grain> kernel_grain(const SlicedCall& call, int axis, AxisMask fixed);
// Return which rows of `rows_of(call, axis)` are possible.
std::optional<Grain> grain_of_rows(const SlicedCall& call, int axis);
// Return the number of rows with which columns are compared, and of which the sums are found at
// least at once. `axis` is the first axis of the columns.
std::int64_t rows_to_compare(const SlicedCall& call, int axis);
// Return the axes on which `box` has a single position, but for the last.
AxisMask outer_axes(const Box& box);
// Return in how many pieces a trial computes the slice `box` once more, one after the other; 0 or 1
// if there is no trial.
std::int64_t tried_pieces(const SlicedCall& call, const Box& box);
// Return the most positions of a piece of the slice `box`, if there are about `pieces` of them.
std::int64_t piece_length(const SlicedCall& call, const Box& box, std::int64_t pieces);
// Return how many rows of `rows_of(call, axis)` are computed at once, so that they need at most
// `most` bytes if possible.
std::int64_t rows_at_once(const SlicedCall& call, int axis, Bytes most);
// Return `box`, or a larger box around it if the operator cannot compute just these positions.
Box widened(const SlicedCall& call, const Box& box);
// Return true if the positions `box` of the result can be computed.
bool is_possible(const SlicedCall& call, const Box& box);
// Return an upper bound of the bytes in memory while the slice `box` is computed, result included.
Bytes bytes_of(const SlicedCall& call, const Box& box);
// The same for the positions `box` of `view`, a view of the result.
Bytes bytes_of_view(const SlicedCall& call, const Geometry& view, const Box& box);
// Return the positions of argument `index` that the positions `range` of the result need; none if
// they need all.
std::optional<Range> range_of_argument(
    const SlicedCall& call, std::size_t index, const Range& range
);
// The same for a box.
Box box_of_argument(const SlicedCall& call, std::size_t index, const Box& box);

// How to compute the results of a call: along which axis of the first result, and how many
// positions at once. The axis is `GATHERED` if the losses of all rows are gathered first.
struct SlicePlan final {
    static constexpr int GATHERED = -1;

    int axis = 0;
    std::int64_t length = 0;
    std::int64_t unit = 1;  // slices have a multiple of so many positions
    bool repeats = false;   // each slice computes all rows of some argument again
    Bytes workspace = 0;    // bytes of the slices that are in memory at once
};

// Return in how many slices `plan` computes the results of `call`.
std::int64_t slices_of(const SlicedCall& call, const SlicePlan& plan);
// Return the plan with the largest slices that need at most `available` bytes. If even the smallest
// slices need more, return the plan for these. Return none if the call cannot run in slices.
std::optional<SlicePlan> plan_of(const SlicedCall& call, Bytes available);
// Return the largest number of bytes of slices that helps: more slices would not be faster.
Bytes useful_workspace(const SlicedCall& call);

}  // namespace rekindle
