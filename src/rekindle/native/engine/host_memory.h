// What has a copy on the host, and what it would cost to have one more. Twin of
// rekindle.engine._host.
#pragma once

#include <utility>
#include <vector>

#include "../base/types.h"
#include "graph.h"
#include "ways.h"

namespace rekindle {

// Storages in the order in which they came, and one time for each. There are few: what is copied is
// large.
class Moves final {
public:
    using Move = std::pair<Storage*, Nanoseconds>;

    void put(Storage& storage, Nanoseconds time) { moves_.emplace_back(&storage, time); }

    // Whether it was among them.
    bool take(const Storage& storage) noexcept;
    bool has(const Storage& storage) const noexcept;

    bool empty() const noexcept { return moves_.empty(); }

    auto begin() const noexcept { return moves_.begin(); }

    auto end() const noexcept { return moves_.end(); }

private:
    std::vector<Move> moves_;
};

// Counts the copies on the host. A `Ledger` makes them and lets go of them.
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
    const bool only;  // what there is room for is always swapped, never recomputed
    Bytes nbytes = 0;
    Bytes peak = 0;
    Bytes swapped_out = 0;  // in all
    Bytes swapped_in = 0;   // in all
    Ways ways;
    Nanoseconds turn = 0;  // when a forward pass was last seen
    std::vector<Storage*> copies;
    Moves saving;                         // copies made ahead, and when they end
    Moves coming;                         // brought back ahead, not used since then
    std::vector<Storage*> refused;        // no recipe, and no room for a copy
    std::vector<Ref<Storage>> discarded;  // nobody needs their copies any more

    void take(Storage& storage);
    void drop(Storage& storage) noexcept;
    // There was no room for the copy that was just taken, so there is none for more.
    void failed(Storage& storage) noexcept;
    bool refuses(const Storage& storage) const noexcept;

    // How much must go before `more` bytes fit; not above 0: they do.
    Bytes lacks(Bytes more) const noexcept {
        return limit == UNLIMITED ? 0 : nbytes + more - limit;
    }

    // Copies of residents, oldest first, without which `more` bytes fit: into `found`; none if
    // never.
    void spare(Bytes more, std::vector<Storage*>& found) const;
    // What is away and wanted first, of what can be back before it is wanted; null: nothing.
    Storage* next_back(Nanoseconds now) const noexcept;
    // Of having back what has a copy, or of a copy and having it back.
    Nanoseconds cost(Storage& storage) const noexcept;
    // Whether a candidate has been unused for so long that it may stay so, and is dear enough for
    // its bytes.
    bool worth_copying(const Storage& storage, Nanoseconds now) const noexcept;
    // What swapping `storage` out now would keep the program waiting for.
    Nanoseconds waiting(const Storage& storage, Nanoseconds now) const noexcept;
};

}  // namespace rekindle
