// Plans how to compute the results of a sliced call: along which axis, and how much at once.
#pragma once

#include <cstdint>
#include <optional>

#include "../../base/types.h"
#include "../../ops/slicing.h"
#include "slice.h"
#include "sliced_call.h"

namespace rekindle {

// Return true if slices along `axis` are columns: `axis` is the axis that a loss adds up, and the
// sums of the rows are computed first.
bool has_columns(const SlicedCall& call, int axis);
// Return true if slices along `axis` are cut out of rows, which are computed as a whole: there is
// no other way to compute columns with the same bits.
bool goes_through_rows(const SlicedCall& call, int axis);
// Return which slices along `axis` the kernel of `call` computes as it computes the whole
// (`grain_of_kernel`).
std::optional<Grain> kernel_grain(const SlicedCall& call, int axis);
// Return which slices along `axis` are possible; none if the call cannot be sliced along it.
std::optional<Grain> grain_of(const SlicedCall& call, int axis);
// Return the number of rows with which columns are compared, and of which the sums are found at
// least at once.
std::int64_t rows_to_compare(const SlicedCall& call);
// Return an upper bound of the bytes in memory while the slice `range` is computed, result
// included.
Bytes bytes_of(const SlicedCall& call, const Range& range);

// How to compute the results of a call: along which axis of the first result, and how many
// positions at once. The axis is `GATHERED` if the losses of all rows are gathered first.
struct SlicePlan final {
    static constexpr int ALL_AT_ONCE = -1;
    static constexpr int GATHERED = -2;

    int axis = ALL_AT_ONCE;
    std::int64_t length = 0;
    std::int64_t unit = 1;  // slices have a multiple of so many positions
    Bytes workspace = 0;    // bytes of the slices that are in memory at once
};

// Return the plan with the largest slices that need at most `available` bytes. If even the smallest
// slices need more, return the plan for these. Return none if the call cannot run in slices.
std::optional<SlicePlan> plan_of(const SlicedCall& call, Bytes available);
// Return the largest number of bytes of slices that helps: more slices would not be faster.
Bytes useful_workspace(const SlicedCall& call);

}  // namespace rekindle
