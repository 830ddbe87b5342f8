// What to evict where the device has no room in one piece: the cheapest neighbors in memory. Twin
// of rekindle.simulator.allocator._window.
//
// The sliding window of Coop (Zhang, Ma, Liu, Yuan; NeurIPS 2023, arXiv 2311.00591), over the
// blocks that the device's allocator tells of, with the policy's score without the size as the
// loss.
//
// Missing: whole segments that would go for less, and that a request finds its place among the
// blocks of its own stream and pool only. Where the window does not help, room is made by the sum.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "../base/types.h"

namespace rekindle {

// A piece of a segment of the device's memory, as its allocator has it.
struct Block final {
    Bytes address;
    Bytes nbytes;
    bool used;
    std::optional<double> loss;  // of evicting what is in there; none: it stays
};

// Blocks side by side, the last one included.
struct Window final {
    double loss;
    std::size_t first;
    std::size_t last;
};

// The neighbors that go for the least loss so that `nbytes` are free in one piece, if there are
// such. `blocks`: those of one segment, in order.
std::optional<Window> cheapest_window(std::span<const Block> blocks, Bytes nbytes);

}  // namespace rekindle
