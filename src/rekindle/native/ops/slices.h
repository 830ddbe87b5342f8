// What is known of slices: the types that rules, plans and evaluation share.
#pragma once

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "../torch/geometry.h"

namespace rekindle {

inline constexpr int UNSLICED = -1;  // in place of an axis: all of the argument is needed

// The axis along which each tensor argument of a call is sliced, or `UNSLICED`.
using ArgumentAxes = c10::SmallVector<int, 6>;

// Guards what threads learn while they compute slices: results of trials, possible slices, times,
// and sums of rows. Held for a moment, never while a kernel runs or another mutex is taken.
inline std::mutex slices_mutex;

// What the trials of one signature have shown, for each axis of its result.
class SliceTrials final {
public:
    // Return true if slices of `length` positions along `axis` need no trial: shorter ones and
    // longer ones gave equal bits.
    bool is_tried(int axis, std::int64_t length) const {
        const std::scoped_lock lock(slices_mutex);
        return axis < AXES && equal_[static_cast<std::size_t>(axis)].has(length);
    }

    // Record that slices of `least` to `most` positions along `axis` gave equal bits.
    void passed(int axis, std::int64_t least, std::int64_t most) {
        const std::scoped_lock lock(slices_mutex);
        if (axis < AXES) {
            equal_[static_cast<std::size_t>(axis)].add(least, most);
        }
    }

    // Return true if slices along one of `axes`, bits of a mask, gave other bits.
    bool have_failed(std::uint32_t axes) const {
        const std::scoped_lock lock(slices_mutex);
        return (unequal_ & axes) != 0;
    }

    // Record that slices along `axes`, bits of a mask, gave other bits.
    void failed(std::uint32_t axes) {
        const std::scoped_lock lock(slices_mutex);
        unequal_ |= axes;
    }

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

    // Return true if there are no zeros in `result`. Places do not overlap.
    bool fills(const Geometry& result) const {
        std::int64_t total = 0;
        for (const Place& each : places) {
            total += each.length;
        }
        return total == result.sizes[static_cast<std::size_t>(axis)];
    }
};

// Along `axis`, position `i` of the result is position `i / factor` of the only argument.
struct Upsampling final {
    int axis = UNSLICED;    // there is no such axis
    std::int64_t size = 0;  // positions of the argument
    std::int64_t factor = 1;

    // Return the first position of the argument that the positions from `begin` on need.
    std::int64_t begin_of(std::int64_t begin) const noexcept { return begin / factor; }

    // Return the end of the positions of the argument that the positions up to `end` need.
    std::int64_t end_of(std::int64_t end) const noexcept { return (end - 1) / factor + 1; }

    // Return an upper bound of the positions of the argument that `length` positions need.
    std::int64_t most_needed(std::int64_t length) const noexcept {
        return std::min(size, (length + factor - 2) / factor + 1);
    }
};

// How calls with one signature run in slices. axes: for each axis of the first result, which slices
// of the arguments it needs; none if the operator cannot be sliced along it.
struct Slicing final {
    std::vector<Geometry> results;
    std::vector<std::optional<ArgumentAxes>> axes;
    SliceTrials trials;
    // The operator is pointwise, and its kernel may give an element other bits if it is among those
    // that do not fill a vector register.
    bool blockwise = false;
    int threads = 1;  // with so many threads the kernel runs
    Joining joining;
    Upsampling upsampling;
};

}  // namespace rekindle
