// Chooses checkpoints of a long recomputation: calls after which all values that later calls need
// stay in memory. Twin of rekindle.engine._checkpoints.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "../base/address_map.h"
#include "graph.h"

namespace rekindle {

// A checkpoint: the storages to keep in memory after the call at index `after` has run.
struct Checkpoint final {
    std::size_t after;
    std::vector<Storage*> storages;
};

// Choose checkpoints for the recomputation of `calls`, which run in this order. `free`: bytes that
// are free or that candidates for eviction occupy. Half of them is for checkpoints, and the other
// half for the results of the calls between two checkpoints. `evictable`: the candidates among the
// storages that the calls read. Return the checkpoints in order; none if the results of all calls
// fit.
std::vector<Checkpoint> choose_checkpoints(
    std::span<Call* const> calls, Bytes free, AddressMap<bool>& evictable
);

}  // namespace rekindle
