// Keeps the memory that a device's allocator reserves within a limit.
//
// NOTE [Budgets of reserved memory]
//
// Rationale: a budget counts bytes, but an allocator needs them in one piece. PyTorch's caching
// allocator may reserve twice as much as it gives out. Before a large result is made, this class
// makes sure that a free block of its size exists, and evicts what lies in the cheapest place
// otherwise. The allocator itself would first return its whole cache to the device, which
// synchronizes.
//
// Limit: the budget, if it is one of reserved memory. After an allocation has failed, the limit is
// the amount that the device turned out to have.
//
// Not modelled: the stream that a free block belongs to, and results of up to 1 MiB, which live in
// segments of their own.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "../base/types.h"
#include "neighbors.h"

namespace rekindle {

class Driver;

class Reserved final {
public:
    explicit Reserved(Driver& driver) : driver_(driver) {}

    // The budget limits reserved memory, not allocated memory.
    bool is_the_budget = false;

    // Note that the device has no more than `reserved` bytes for the allocator.
    void turned_out(Bytes reserved) noexcept { found_ = reserved; }

    // Forget what is known of the device: the program was given another budget.
    void forget() noexcept { found_.reset(); }

    bool limited() const noexcept { return is_the_budget || found_; }

    // Make a free block for an allocation of `nbytes`, if possible. Does nothing without a limit.
    void find_place(Bytes nbytes);

    // Return the number of blocks for which something was evicted.
    int places() const noexcept { return places_; }

private:
    Bytes missing(Bytes nbytes) const;
    bool take(Bytes nbytes);
    void make_by_sum(Bytes nbytes);
    void give_back();
    void ask_allocator();
    Segments now() const;
    void count_gaps();

    Driver& driver_;
    std::optional<Bytes> found_;
    // Blocks at the last query of the allocator. Blocks marked `used` belong to other code.
    Segments told_;
    Bytes told_reserved_ = -1;
    int since_ = 0;  // failed searches since the last query
    // Free blocks by size: a lower bound of how many there are.
    std::map<Bytes, int> gaps_;
    int places_ = 0;
};

}  // namespace rekindle
