// What is known of slices: the types that rules, plans and evaluation share.
#pragma once

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "../torch/geometry.h"

namespace rekindle {

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

// Along `axis`, position `i` of the result follows from `reach` positions of the first argument,
// from `i * stride / factor - padding` on. What lies outside of the argument is no position. A
// slice is computed from the positions that it needs, by the same operator with the same padding.
// So the first results, which follow from too few positions, are cut off, and those after the last.
struct Stencil final {
    int axis = UNSLICED;    // there is no such axis
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

}  // namespace rekindle
