// Allocator for whole pages, mapped from the system and cached when they are freed.
//
// A freed block stays mapped and merges with its free neighbors, so that a later allocation causes
// no page faults. An allocation gets the smallest free block that is large enough, or a part of
// this block. Blocks, free or in use, stay within a limit plus 4 MiB: the oldest free blocks are
// unmapped first. If no free block is large enough and the limit is near, the pages of several free
// blocks are moved into a new block. Fresh pages would cost more time, because the system clears
// each page.
//
// `Bins` cuts small pieces from blocks. Only `Arena` and `Bins` call `Blocks`, in any thread,
// without holding a leaf lock.
#pragma once

#include <atomic>
#include <cstddef>
#include <list>
#include <map>

#include "../base/address_map.h"
#include "../base/mutex.h"
#include "../base/types.h"

namespace rekindle {

// Allocator of blocks of mapped pages. A limit bounds the free blocks that it keeps.
class Blocks final {
public:
    // Allocate a block of at least `nbytes` bytes, of which the program requested `asked` bytes.
    // Return null if the system has no memory.
    void* take(std::size_t nbytes, std::size_t asked);
    // Free the block at `address`, which `take` returned. Return false if no such block is in use.
    bool give(void* address);
    // Return true if `take` returned the block at `address`, and the block was not freed since.
    bool has(const void* address) noexcept;
    // Begin a budget. Its limit does not count blocks that are in use since earlier budgets, which
    // are like memory of other allocators: the program may never use them in this budget.
    void begin();
    // End the budget. The system may take the pages of free blocks from now on. If it has not when
    // the next budget begins, as for a budget around each step, that budget reuses them without
    // page faults. Blocks that are freed until then are unmapped. Unless `lazily`, unmap free
    // blocks.
    void end(bool lazily);
    // Set the limit in bytes for all blocks, free or in use, which they may exceed by 4 MiB.
    void limit(Bytes most);

    // Set how many bytes of CPU memory the program holds, from this and from other allocators. The
    // caller counts them. The bytes from other allocators count against the limit.
    void note_counted(Bytes memory) noexcept {
        const Bytes outside = memory - asked_.load(std::memory_order_relaxed);
        outside_.store(outside > 0 ? outside : 0, std::memory_order_relaxed);
    }

    // Add `nbytes` to the count of bytes that the program requested and has not freed.
    void note_asked(Bytes nbytes) noexcept { asked_.fetch_add(nbytes, std::memory_order_relaxed); }

    // Return the bytes of free blocks whose pages the system may not take.
    Bytes cached() const noexcept { return cached_.load(std::memory_order_relaxed); }

    // Return the bytes of blocks in use, including those that the limit does not count.
    Bytes live() const noexcept {
        return mapped_.load(std::memory_order_relaxed) + earlier_.load(std::memory_order_relaxed);
    }

private:
    struct Block;
    struct Evicted;
    using List = std::list<Block>;
    using BySize = std::multimap<std::size_t, List::iterator>;

    struct Block final {
        char* address = nullptr;
        std::size_t size = 0;
        std::size_t asked = 0;
        bool is_earlier = false;  // In use since an earlier budget (`begin`).
        BySize::iterator place;   // Position in `by_size_` while the block is free.
    };

    // Return how many bytes of new blocks fit into the limit before free blocks must be unmapped.
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
    List free_;                              // Free blocks, the oldest first.
    AddressMap<List::iterator> by_address_;  // Blocks in use by address.
    BySize by_size_;                         // Free blocks by size.
    AddressMap<List::iterator> by_start_;    // Free blocks by first address.
    AddressMap<List::iterator> by_end_;      // Free blocks by the address after the block.
    bool ended_ = true;  // No budget is active; the system may take the pages of free blocks.
    Bytes limit_ = 0;
    Bytes spare_ = 0;                 // Bytes by which all blocks may exceed `limit_`.
    std::atomic<Bytes> mapped_ = 0;   // Bytes of the counted blocks in use.
    std::atomic<Bytes> earlier_ = 0;  // Bytes of blocks in use since earlier budgets.
    std::atomic<Bytes> cached_ = 0;   // Bytes of all free blocks; 0 while `ended_`.
    std::atomic<Bytes> asked_ = 0;    // Bytes that the program requested in counted blocks.
    std::atomic<Bytes> outside_ = 0;  // Bytes that the program holds from other allocators.
};

// Return the resident memory of this process in bytes; 0 if it is unknown.
Bytes resident_bytes() noexcept;

}  // namespace rekindle
