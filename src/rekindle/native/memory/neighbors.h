// What to evict where the device has no room in one piece: the cheapest neighbors in memory. Twin
// of rekindle.simulator.allocator._window.
//
// The sliding window of Coop (Zhang, Ma, Liu, Yuan; NeurIPS 2023, arXiv 2311.00591), over the
// blocks that the device's allocator tells of, with the policy's score without the size as the
// loss.
//
// Or all that is in some segments, which then go back to the device, where that is cheaper.
//
// Missing: that a request finds its place among the blocks of its own stream and pool only. Where
// neither helps, room is made by the sum.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "../base/types.h"

namespace rekindle {

// A piece of a segment of the device's memory, as its allocator has it.
struct Block final {
    Bytes address;
    Bytes nbytes;
    bool used;
    std::optional<double> loss;  // of evicting what is in there; none: it stays
};

// The blocks of each segment, in order.
using Segments = std::vector<std::vector<Block>>;

// How a place was made.
enum class Way { none, neighbors, whole_segments };

// Blocks side by side, the last one included.
struct Window final {
    double loss;
    std::size_t first;
    std::size_t last;
};

// The neighbors that go for the least loss so that `nbytes` are free in one piece, if there are
// such. `blocks`: those of one segment, in order.
std::optional<Window> cheapest_window(std::span<const Block> blocks, Bytes nbytes);

// Which segments of `nbytes` in all go for the least loss, by their numbers: those that cost least
// for a byte, until it is enough.
struct Release final {
    double loss;
    std::vector<std::size_t> segments;
};

std::optional<Release> cheapest_release(const Segments& segments, Bytes nbytes);

}  // namespace rekindle
