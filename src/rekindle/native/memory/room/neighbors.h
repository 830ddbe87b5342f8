// Chooses values to evict when a device has no free block of the wanted size, by the method of Coop
// (Zhang, Ma, Liu, Yuan; NeurIPS 2023, arXiv 2311.00591).
//
// A sliding window runs over the blocks that the device's allocator reports. The loss of a block is
// the policy's score of its value, not divided by the size. Twin of
// rekindle.simulator.allocator._window.
//
// Emptying whole segments may be cheaper: the allocator then returns these segments to the device.
//
// Not modelled: a request only fits blocks of its own stream and pool. If neither method helps, the
// caller evicts a number of bytes, wherever they lie.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "../../base/types.h"

namespace rekindle {

// A block of memory in a segment of a caching allocator, as the device's allocator reports it.
struct Block final {
    Bytes address;
    Bytes nbytes;
    bool used;
    // Policy score of the value in the block: the loss of evicting it. None if the value cannot be
    // evicted.
    std::optional<double> loss;
};

// The blocks of each segment of the device's allocator, sorted by address.
using Segments = std::vector<std::vector<Block>>;

// How a free block was made: not at all, by evicting values next to each other, or by emptying
// whole segments.
enum class Way { none, neighbors, whole_segments };

// Adjacent blocks of one segment of the allocator, by index. `last` is included.
struct Window final {
    double loss;
    std::size_t first;
    std::size_t last;
};

// Return the window with the least loss that frees `nbytes` in one piece, or none. `blocks` are all
// blocks of one segment, by address.
std::optional<Window> cheapest_window(std::span<const Block> blocks, Bytes nbytes);

// Segments of the allocator to empty by evicting their contents, by index, and the total loss of
// these evictions.
struct Release final {
    double loss;
    std::vector<std::size_t> segments;
};

// Choose segments of the allocator to empty, in the order of increasing loss per byte, until they
// have `nbytes` in all. Return none if all segments that can be emptied have less.
std::optional<Release> cheapest_release(const Segments& segments, Bytes nbytes);

}  // namespace rekindle
