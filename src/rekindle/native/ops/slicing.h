// Which slice of each argument an operator needs to compute a slice of its results.
//
// NOTE [Operators in slices]
//
// A result that does not fit into the budget is computed slice by slice, each when something reads
// it. A row of a product needs one row of its first factor and all of the second; a column needs
// one column of the second. The rules here hold only if the kernel computes every element in the
// same order, whatever the slice: then the bits are those of the whole. So a sum is never split
// along the axis that it adds up. The first run of each signature in slices is compared with its
// own pieces, and so is each that is shorter or longer than those compared before (`SliceTrials`),
// because a kernel may still choose another order for other sizes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "../torch/geometry.h"

namespace rekindle {

struct Facts;

inline constexpr int UNSLICED = -1;  // in place of an axis: all of the argument is needed

// The axis along which each tensor argument of a call is sliced, or `UNSLICED`.
using ArgumentAxes = c10::SmallVector<int, 6>;

// What the trials of one signature have shown, for each axis of its result.
class SliceTrials final {
public:
    // Return true if slices of `length` positions along `axis` need no trial: shorter ones and
    // longer ones gave equal bits.
    bool is_tried(int axis, std::int64_t length) const noexcept {
        return axis < AXES && equal_[static_cast<std::size_t>(axis)].has(length);
    }

    // Record that slices of `least` to `most` positions along `axis` gave equal bits.
    void passed(int axis, std::int64_t least, std::int64_t most) noexcept {
        if (axis < AXES) {
            equal_[static_cast<std::size_t>(axis)].add(least, most);
        }
    }

    // Return true if slices along one of `axes`, bits of a mask, gave other bits.
    bool have_failed(std::uint32_t axes) const noexcept { return (unequal_ & axes) != 0; }

    // Record that slices along `axes`, bits of a mask, gave other bits.
    void failed(std::uint32_t axes) noexcept { unequal_ |= axes; }

private:
    struct Lengths final {
        std::int64_t least = 0;
        std::int64_t most = 0;

        bool has(std::int64_t length) const noexcept { return least <= length && length <= most; }

        void add(std::int64_t shortest, std::int64_t longest) noexcept {
            least = most == 0 ? shortest : std::min(least, shortest);
            most = std::max(most, longest);
        }
    };

    static constexpr int AXES = 8;  // along more axes, each slice is tried

    std::array<Lengths, AXES> equal_;
    std::uint32_t unequal_ = 0;
};

// Which slices along one axis are possible: a slice has a multiple of `unit` positions, except for
// the last one, and at least `least`.
struct Grain final {
    std::int64_t unit = 1;
    std::int64_t least = 1;
    bool repeats = false;  // each slice computes all rows again
};

// The result consists of the tensor arguments, each at its own positions along `axis`, and of
// zeros.
struct Joining final {
    // Positions of an argument.
    struct Place final {
        std::int64_t begin = 0;
        std::int64_t length = 0;
    };

    int axis = UNSLICED;  // the result is nothing like that
    std::vector<Place> places;
};

// Along `axis`, position `i` of the result follows from `reach` positions of the first argument, from
// `i * stride / factor - padding` on. What lies outside of the argument is no position. A slice is
// computed from the positions that it needs, by the same operator with the same padding. So the
// first results, which follow from too few positions, are cut off, and those after the last.
struct Stencil final {
    int axis = UNSLICED;  // there is no such axis
    std::int64_t size = 0;  // positions of the argument
    std::int64_t stride = 1;
    std::int64_t padding = 0;
    std::int64_t reach = 1;
    std::int64_t factor = 1;  // so many positions follow from the same ones

    // Return the first position that is computed in order to get the positions from `begin` on.
    std::int64_t first(std::int64_t begin) const noexcept {
        const std::int64_t lead = (padding + stride - 1) / stride;
        return std::max(begin - lead, std::int64_t{0}) / factor * factor;
    }

    // Return the first position of the argument that the positions from `begin` on need.
    std::int64_t begin_of(std::int64_t begin) const noexcept {
        return first(begin) * stride / factor;
    }

    // Return the end of the positions of the argument that the positions up to `end` need.
    std::int64_t end_of(std::int64_t end) const noexcept {
        return std::min(size, (end - 1) * stride / factor - padding + reach);
    }

    // Return how many positions are computed from `length` positions of the argument.
    std::int64_t computed(std::int64_t length) const noexcept {
        return ((length + 2 * padding - reach) / stride + 1) * factor;
    }

    // Return an upper bound of the positions of the argument that `length` positions need.
    std::int64_t most_needed(std::int64_t length) const noexcept {
        const std::int64_t lead = (padding + stride - 1) / stride + factor - 1;
        return std::min(size, (length - 1 + lead) * stride / factor + reach);
    }
};

// How calls with one signature run in slices. axes: for each axis of the first result, which slices
// of the arguments it needs; none if the operator cannot be sliced along it.
struct Slicing final {
    std::vector<Geometry> results;  // those that are defined, which are the first
    std::vector<std::optional<ArgumentAxes>> axes;
    SliceTrials trials;
    // The operator is pointwise, and its kernel may give an element other bits if it is among those
    // that do not fill a vector register.
    bool blockwise = false;
    int threads = 1;  // with so many threads the kernel runs
    Joining joining;
    Stencil stencil;
    // For each axis: with fewer positions, another kernel runs. Empty if that is not known.
    std::vector<std::int64_t> least;
};

// Return true if there are rules for the operator. Every result of such an operator follows from
// its arguments alone.
bool has_slices(const Facts& facts, const c10::OperatorHandle& op);
// A share of the budget: operators that read nothing larger make nothing large.
constexpr std::int64_t SMALL_SHARE = 256;

// Return true if one of `tensors` is so large that slices may help within `budget` bytes.
inline bool is_any_large(std::span<c10::TensorImpl* const> tensors, std::int64_t budget) {
    return std::ranges::any_of(tensors, [&](const c10::TensorImpl* each) {
        return each->numel() * static_cast<std::int64_t>(each->itemsize()) > budget / SMALL_SHARE;
    });
}

// Return which slices of the tensor arguments a slice of the results along `axis` needs; none if
// the operator cannot be sliced along `axis`. `given` are all arguments, with any tensors of the
// right shapes. `result` is the geometry of the first result.
std::optional<ArgumentAxes> axes_of_arguments(
    const Facts& facts,
    const c10::OperatorHandle& op,
    std::span<const Geometry> arguments,
    std::span<const c10::IValue> given,
    const Geometry& result,
    int axis
);
// Return how the operator joins its tensor arguments, or pads one with zeros. `arguments` are their
// geometries, `given` are all arguments, and `result` is the geometry of the result.
Joining joining_of(
    const Facts& facts,
    std::span<const Geometry> arguments,
    std::span<const c10::IValue> given,
    const Geometry& result
);
// Note in `found`, of which the results and axes are known, along which axis slices need other
// positions of the argument, and how few suffice. same_settings: PyTorch's settings are those of
// the call. The caller has made sure that operators are not intercepted.
void find_stencil(
    const Facts& facts,
    std::span<const Geometry> arguments,
    std::span<const c10::IValue> given,
    bool same_settings,
    Slicing& found
);
// Return true if the operator, when it runs in slices, reads only the shape of its tensor argument
// `index`.
bool reads_only_shape(const Facts& facts, std::size_t index);
// Return which slices along `axis` the operator's kernel computes as it computes the whole, if
// there is only one position on the axes in the mask `fixed`. Products have other kernels for
// threads with few rows or columns. Sums of columns, and softmax of columns, are computed in blocks
// of columns, and what is left over in another way. Kernels of pointwise operators compute whole
// vector registers of elements, and what is left over at the end, and at the end of each thread's
// share, in another way (`Slicing::blockwise`). Return none if slices along `axis` cannot repeat
// that.
std::optional<Grain> grain_of_kernel(
    const Facts& facts,
    const c10::OperatorHandle& op,
    std::span<const Geometry> arguments,
    const Slicing& slicing,
    int axis,
    std::uint32_t fixed
);
// Return true if the operator is pointwise, and not one of those whose result is exact, so that all
// ways to compute it agree. `given` are the arguments.
bool is_blockwise(
    const Facts& facts, const c10::OperatorHandle& op, std::span<const c10::IValue> given
);

}  // namespace rekindle
