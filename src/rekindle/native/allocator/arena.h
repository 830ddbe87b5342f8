// Allocator that keeps the CPU memory of the whole process within the budget.
//
// The C library caches much of the memory that is freed, so a limit on tensors alone would not
// limit the memory of the process. While a budget is active on the CPU, PyTorch allocates from this
// arena: small pieces from `Bins`, larger ones from `Blocks`. `Blocks` returns free memory that
// exceeds the budget to the system. Memory that a program still uses after the budget stays valid,
// and is unmapped when it is freed.
//
// Memory that does not come from PyTorch's allocator is not affected: memory of NumPy and other
// libraries, shared memory, page-locked memory. The counting allocator calls `take` and `give` in
// any thread; sessions call the rest.
#pragma once

#include <atomic>
#include <cstddef>

#include "../base/types.h"
#include "bins.h"
#include "blocks.h"

namespace rekindle {

// The CPU memory of all budgets of the process, of which only one is active at a time.
class Arena final {
public:
    // Begin a budget of `limit` bytes on the CPU.
    void open(Bytes limit);
    // End the budget. The system may take the memory that is free from now on; unless `lazily`, it
    // gets that memory at once.
    void close(bool lazily);
    // Change the limit of the active budget, if a budget is active on the CPU.
    void limit(Bytes limit);

    // Set how many bytes of CPU memory the program holds, from all allocators. The caller counts.
    void note_counted(Bytes memory) noexcept { blocks_.note_counted(memory); }

    // Allocate `nbytes` of memory. Return null if no budget is active on the CPU, or if the system
    // has no memory.
    void* take(std::size_t nbytes);
    // Free the memory at `address`, which `take` returned during this or an earlier budget. Return
    // false if `take` did not return this address.
    bool give(void* address);

    // Return true if a budget was ever active on the CPU, so that memory may come from this arena.
    bool was_open() const noexcept { return was_open_.load(std::memory_order_relaxed); }

    // Return the bytes of free memory that the system may not take.
    Bytes cached() const noexcept { return blocks_.cached(); }

    // Return the bytes of the blocks in use, including unused parts of these blocks.
    Bytes live() const noexcept { return blocks_.live(); }

private:
    Blocks blocks_;
    Bins bins_{blocks_};
    std::atomic<bool> is_open_{false};
    std::atomic<bool> was_open_{false};
};

// Return the arena of the process. It is never destroyed, because memory may be freed while the
// process ends.
Arena& the_arena() noexcept;

}  // namespace rekindle
