#include "checkpoints.h"

#include <algorithm>

namespace rekindle {

namespace {

// A storage with the indices of the call that makes it and of the last call that reads it.
struct Life final {
    Storage* storage;
    std::size_t begin;
    std::size_t end;
};

// Return the `Life` (maker and last reader) of each storage that the calls make, and of each
// evictable storage that they read.
std::vector<Life> lives_of(std::span<Call* const> calls, AddressMap<bool>& evictable) {
    std::vector<Life> lives;
    AddressMap<std::size_t> places;
    for (std::size_t index = 0; index < calls.size(); ++index) {
        for (const Edge& edge : calls[index]->inputs()) {
            Storage* storage = edge.value->storage;
            if (const std::size_t* found = places.find(storage)) {
                lives[*found].end = index;
            } else if (evictable.find(storage) != nullptr) {
                const auto later = std::ranges::upper_bound(
                    calls, storage->root.call->id, {}, [](const Call* call) { return call->id; }
                );
                const auto begin = static_cast<std::size_t>(later - calls.begin());
                places.put(storage, lives.size());
                lives.push_back({storage, begin, index});
            }
        }
        for (const Value* value : calls[index]->outputs()) {
            if (is_root(*value) && places.find(value->storage) == nullptr) {
                places.put(value->storage, lives.size());
                lives.push_back({value->storage, index, index});
            }
        }
    }
    return lives;
}

// Return the indices of the calls after which to make checkpoints. Between two checkpoints, calls
// make at most about `spacing` bytes. Each checkpoint is where few bytes are alive.
std::vector<std::size_t> positions(
    std::span<Call* const> calls, std::span<const Bytes> alive, Bytes spacing
) {
    std::vector<std::size_t> chosen;
    Bytes made = 0;
    Bytes made_at_best = 0;
    // Best place so far for the next checkpoint: the index of the call after which the fewest bytes
    // are alive. Only calls count up to which at least half of `spacing` was made since the last
    // checkpoint.
    std::size_t best = calls.size();
    for (std::size_t index = 0; index < calls.size(); ++index) {
        made += calls[index]->nbytes;
        if (2 * made >= spacing && (best == calls.size() || alive[index] <= alive[best])) {
            best = index;
            made_at_best = made;
        }
        if (made >= spacing) {
            chosen.push_back(best);
            made -= made_at_best;
            best = calls.size();
        }
    }
    return chosen;
}

}  // namespace

std::vector<Checkpoint> choose_checkpoints(
    std::span<Call* const> calls, Bytes free, AddressMap<bool>& evictable
) {
    const Bytes half = free / 2;
    Bytes made = 0;
    for (const Call* call : calls) {
        made += call->nbytes;
    }
    // If memory already exceeds its limit, `half` is negative.
    if (half <= 0 || made <= half) {
        return {};
    }
    const std::vector<Life> lives = lives_of(calls, evictable);
    std::vector<Bytes> alive(calls.size() + 1, 0);
    for (const Life& life : lives) {
        alive[life.begin] += life.storage->nbytes;
        alive[life.end] -= life.storage->nbytes;
    }
    for (std::size_t index = 1; index < alive.size(); ++index) {
        alive[index] += alive[index - 1];
    }
    // Increase the spacing until the checkpoints fit into half of the free bytes.
    Bytes spacing = half;
    std::vector<std::size_t> chosen;
    Bytes kept = 0;
    do {
        chosen = positions(calls, alive, spacing);
        kept = 0;
        for (const std::size_t index : chosen) {
            kept += alive[index];
        }
        spacing += spacing / 4 + 1;
    } while (kept > half);
    std::vector<Checkpoint> checkpoints;
    for (const std::size_t index : chosen) {
        Checkpoint& checkpoint = checkpoints.emplace_back(Checkpoint{index, {}});
        for (const Life& life : lives) {
            if (life.begin <= index && index < life.end) {
                checkpoint.storages.push_back(life.storage);
            }
        }
    }
    return checkpoints;
}

}  // namespace rekindle
