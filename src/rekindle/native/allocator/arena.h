// Memory on the CPU within a budget: what the process takes stays near what the program holds.
//
// The C library keeps much of what is freed, and the budget would bound the tensors but not the
// process. While a budget is active on the CPU, PyTorch's allocations come from here: small ones
// from `Bins`, others from `Blocks`, which give back to the system what does not fit in the budget.
// Memory that outlives the budget stays valid, and goes back when it is freed. What does not come
// from PyTorch's allocator is not touched: NumPy, shared memory, page-locked memory, libraries'
// own. The counting allocator calls `take` and `give`, in any thread; drivers call the rest.
#pragma once

#include <atomic>
#include <cstddef>

#include "../base/types.h"
#include "bins.h"
#include "blocks.h"

namespace rekindle {

class Arena final {
public:
    // A budget of `limit` bytes begins.
    void open(Bytes limit);
    // It is over: all that is cached goes back to the system.
    void close();
    // The budget is `limit` bytes from now on, if there is one.
    void limit(Bytes limit);

    // The program holds `memory` bytes in all, wherever they came from.
    void note_counted(Bytes memory) noexcept { blocks_.note_counted(memory); }

    // Null: no budget is active, or the system has no memory.
    void* take(std::size_t nbytes);
    // Frees what `take` returned, within a budget or later. Returns false if it never did.
    bool give(void* address);

    // Whether memory may ever have come from here.
    bool was_open() const noexcept { return was_open_.load(std::memory_order_relaxed); }

    // Bytes of mapped memory that the program does not use.
    Bytes cached() const noexcept { return blocks_.cached(); }

    // Bytes of mapped memory that the program uses, or a part of it.
    Bytes live() const noexcept { return blocks_.live(); }

private:
    Blocks blocks_;
    Bins bins_{blocks_};
    std::atomic<bool> is_open_{false};
    std::atomic<bool> was_open_{false};
};

// Of the process. Never destroyed: memory may be freed while the process ends.
Arena& the_arena() noexcept;

}  // namespace rekindle
