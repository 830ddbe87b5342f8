// Memory in whole pages, mapped from the system and cached when it is freed.
//
// A freed block stays mapped and joins its free neighbors, so that the next request costs no page
// faults: it gets the smallest free block that suffices, or a part of it. Live and free blocks
// together stay within a limit: the oldest free ones are unmapped first. Where no free block
// suffices and the limit is near, the pages of several become those of the block that is wanted:
// new pages cost more, for the system clears each. `Bins` cuts small pieces from blocks. Only
// `Arena` and `Bins` call this, in any thread, without a leaf lock.
#pragma once

#include <atomic>
#include <cstddef>
#include <list>
#include <map>

#include "../base/addresses.h"
#include "../base/mutex.h"
#include "../base/types.h"

namespace rekindle {

class Blocks final {
public:
    // Returns at least `nbytes`, of which the program asked for `asked`; null: the system has none.
    void* take(std::size_t nbytes, std::size_t asked);
    // Frees what `take` returned. Returns false if it never did.
    bool give(void* address);
    // Whether `address` came from `take` and was not freed.
    bool has(const void* address) noexcept;
    // Sets what live and free blocks may take together. 0: each block is unmapped when it is
    // freed, and those that are free now.
    void limit(Bytes most);

    // The program holds `memory` bytes in all. What did not come from here narrows the limit.
    void note_counted(Bytes memory) noexcept {
        const Bytes outside = memory - asked_.load(std::memory_order_relaxed);
        outside_.store(outside > 0 ? outside : 0, std::memory_order_relaxed);
    }

    // The program asked for so many bytes more within a live block.
    void note_asked(Bytes nbytes) noexcept { asked_.fetch_add(nbytes, std::memory_order_relaxed); }

    // Bytes of free blocks, which are still mapped.
    Bytes cached() const noexcept { return cached_.load(std::memory_order_relaxed); }

    // Bytes of live blocks.
    Bytes live() const noexcept { return mapped_.load(std::memory_order_relaxed); }

private:
    struct Block;
    struct Evicted;
    using List = std::list<Block>;
    using BySize = std::multimap<std::size_t, List::iterator>;

    struct Block final {
        char* address = nullptr;
        std::size_t size = 0;
        std::size_t asked = 0;
        BySize::iterator place;  // while it is free
    };

    // Bytes that new blocks may take before free ones have to go.
    Bytes room() const noexcept;
    void* reuse(std::size_t size, std::size_t asked);
    void* map_new(std::size_t size, std::size_t asked);
    void take_pieces(std::size_t size, List& pieces);
    void charge(const Block& block, int times) noexcept;
    void note_free(List::iterator block);
    void note_not_free(List::iterator block) noexcept;
    void join_neighbors(List::iterator block);
    void split(List::iterator block, std::size_t size);
    void evict(Evicted& evicted);
    void evict_oldest(Evicted& evicted);
    char* map_anyway(std::size_t size);

    SpinLock& lock_ = leaf(Leaf::arena);
    List live_;
    List free_;                             // the oldest first
    Addresses<List::iterator> by_address_;  // live ones
    BySize by_size_;                        // free ones
    Addresses<List::iterator> by_start_;    // likewise, by their address
    Addresses<List::iterator> by_end_;      // likewise, by the one behind them
    Bytes limit_ = 0;
    std::atomic<Bytes> mapped_ = 0;   // the size of `live_`
    std::atomic<Bytes> cached_ = 0;   // and of `free_`
    std::atomic<Bytes> asked_ = 0;    // what the program asked for of `live_`
    std::atomic<Bytes> outside_ = 0;  // what it holds besides that
};

// Bytes of this process that are in memory; 0: the system does not say.
Bytes resident_bytes() noexcept;

}  // namespace rekindle
