// Bookkeeping of the copies of values in host memory, and the cost of making a copy. Twin of
// rekindle.engine._host.
#pragma once

#include <utility>
#include <vector>

#include "../base/types.h"
#include "graph.h"
#include "host_link.h"
#include "step_order.h"

namespace rekindle {

// List of storages that have a transfer in progress, with a time for each, in the order of
// insertion. Linear search suffices: only large storages are copied, so there are few.
class Moves final {
public:
    using Move = std::pair<Storage*, Nanoseconds>;

    void put(Storage& storage, Nanoseconds time) { moves_.emplace_back(&storage, time); }

    // Remove `storage` from the list. Return true if it was in the list.
    bool take(const Storage& storage) noexcept;
    bool has(const Storage& storage) const noexcept;

    bool empty() const noexcept { return moves_.empty(); }

    auto begin() const noexcept { return moves_.begin(); }

    auto end() const noexcept { return moves_.end(); }

private:
    std::vector<Move> moves_;
};

// Counts the copies of values in host memory against `limit`. `Ledger` makes and discards the
// copies.
class HostMemory final {
public:
    explicit HostMemory(const Swap& swap) noexcept
        : limit(swap.host), only(swap.only), link(swap) {}

    HostMemory(const HostMemory&) = delete;
    HostMemory& operator=(const HostMemory&) = delete;
    ~HostMemory() = default;

    Bytes limit;
    const bool only;  // Always swap, never recompute, as long as there is room on the host.
    Bytes nbytes = 0;
    Bytes peak = 0;
    Bytes swapped_out = 0;  // Total bytes swapped out.
    Bytes swapped_in = 0;   // Total bytes swapped in.
    HostLink link;
    StepOrder order;  // the order in which steps use sources
    // The engine's clock after the last operator of the forward pass.
    Nanoseconds turn = 0;
    std::vector<Storage*> copies;
    // Storages that are being copied before their eviction, with the time at which each copy ends.
    Moves saving;
    // Storages that were prefetched and not used since, with the time of the prefetch.
    Moves coming;
    // Storages without a recipe whose copies the host had no room for.
    std::vector<Storage*> refused;
    std::vector<Ref<Storage>> discarded;  // Storages whose host copies are not needed any more.

    // Count a host copy of `storage`.
    void take(Storage& storage);
    // Remove the host copy of `storage` from the counts.
    void drop(Storage& storage) noexcept;
    // Undo `take(storage)`, because the copy failed. The bytes now on the host become the limit.
    void failed(Storage& storage) noexcept;
    bool refuses(const Storage& storage) const noexcept;

    // Return how many bytes must be freed on the host before `more` bytes fit; zero or less if they
    // fit already.
    Bytes lacks(Bytes more) const noexcept {
        return limit == UNLIMITED ? 0 : nbytes + more - limit;
    }

    // Add to `found`, oldest copy first, resident storages whose host copies can be discarded to
    // make room for `more` bytes. Add none if all of these copies do not suffice.
    void spare(Bytes more, std::vector<Storage*>& found) const;
    // Return the swapped-out storage to prefetch next, whose swap-in should end before the program
    // needs it; null if there is none. sources: consider storages without a recipe as well.
    Storage* next_back(Nanoseconds now, bool sources) const noexcept;
    // Return the swapped-out source that the program uses first; null if none is expected to be
    // used.
    Storage* next_used() const noexcept;
    // Return the cost (ns) of swapping `storage` in; if it has no host copy, of swapping it out and
    // in.
    Nanoseconds cost(Storage& storage) const noexcept;
    // Return true if a host copy of the candidate `storage` is worth making. The storage must have
    // been unused for long enough to expect that it stays unused, and its recomputation must be
    // expensive for its size.
    bool worth_copying(const Storage& storage, Nanoseconds now) const noexcept;
    // Return the time (ns) that the program would wait if `storage` were swapped out now.
    Nanoseconds waiting(const Storage& storage, Nanoseconds now) const noexcept;
};

}  // namespace rekindle
