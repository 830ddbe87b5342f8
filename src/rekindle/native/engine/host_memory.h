// Copies of values in host memory, and the cost of making another one. Twin of
// rekindle.engine._host.
#pragma once

#include <utility>
#include <vector>

#include "../base/types.h"
#include "graph.h"
#include "ways.h"

namespace rekindle {

// Storages in insertion order, with a time each. Linear search suffices: only large storages are
// copied, so there are few.
class Moves final {
public:
    using Move = std::pair<Storage*, Nanoseconds>;

    void put(Storage& storage, Nanoseconds time) { moves_.emplace_back(&storage, time); }

    // Remove `storage`. Return true if it was there.
    bool take(const Storage& storage) noexcept;
    bool has(const Storage& storage) const noexcept;

    bool empty() const noexcept { return moves_.empty(); }

    auto begin() const noexcept { return moves_.begin(); }

    auto end() const noexcept { return moves_.end(); }

private:
    std::vector<Move> moves_;
};

// Accounts for the copies on the host. A `Ledger` makes and discards them.
class HostMemory final {
public:
    explicit HostMemory(const Swap& swap) noexcept
        : limit(swap.host), only(swap.only), ways(swap) {}

    HostMemory(const HostMemory&) = delete;
    HostMemory& operator=(const HostMemory&) = delete;
    HostMemory(HostMemory&&) = delete;
    HostMemory& operator=(HostMemory&&) = delete;
    ~HostMemory() = default;

    Bytes limit;
    const bool only;  // Always swap, never recompute, while there is room on the host.
    Bytes nbytes = 0;
    Bytes peak = 0;
    Bytes swapped_out = 0;  // Total bytes swapped out.
    Bytes swapped_in = 0;   // Total bytes swapped in.
    Ways ways;
    Nanoseconds turn = 0;  // Clock when a forward pass was last seen.
    std::vector<Storage*> copies;
    // Copies that are being written ahead of eviction, with the time at which each ends.
    Moves saving;
    Moves coming;                         // Storages that were prefetched and not used since.
    std::vector<Storage*> refused;        // Storages without a recipe, for which there was no room.
    std::vector<Ref<Storage>> discarded;  // Storages whose copies are not needed any more.

    // Count a copy of `storage`.
    void take(Storage& storage);
    // Remove the copy of `storage` from the counts.
    void drop(Storage& storage) noexcept;
    // Undo the last `take`, because the copy failed. The current usage becomes the limit.
    void failed(Storage& storage) noexcept;
    bool refuses(const Storage& storage) const noexcept;

    // Return the bytes to free on the host before `more` bytes fit; zero or less if they fit.
    Bytes lacks(Bytes more) const noexcept {
        return limit == UNLIMITED ? 0 : nbytes + more - limit;
    }

    // Add the copies of resident storages that must be discarded for `more` bytes to `found`,
    // oldest first. Adds none if that does not suffice.
    void spare(Bytes more, std::vector<Storage*>& found) const;
    // Return the swapped-out storage to prefetch next, among those that can arrive before their
    // use; null if there is none.
    Storage* next_back(Nanoseconds now) const noexcept;
    // Return the cost (ns) of swapping `storage` in, or out and in if it has no copy.
    Nanoseconds cost(Storage& storage) const noexcept;
    // Return true if the candidate `storage` has been unused for long enough to expect that it
    // stays unused, and its recomputation is expensive for its size.
    bool worth_copying(const Storage& storage, Nanoseconds now) const noexcept;
    // Return the time (ns) that the program would wait if `storage` were swapped out now.
    Nanoseconds waiting(const Storage& storage, Nanoseconds now) const noexcept;
};

}  // namespace rekindle
