// Keeps the memory that a device's allocator reserves within a limit.
//
// NOTE [Budgets of reserved memory]
//
// Rationale: a budget counts bytes, but an allocator needs them in one piece. PyTorch's caching
// allocator may reserve twice as much as it gives out. Before a large result is made, this class
// makes sure that a free block of that size exists. If there is none, it evicts the values whose
// memory makes such a block at the least cost. Without this class the allocator would return its
// whole cache to the device, which synchronizes the device.
//
// Limit: the budget, if the user gave it as a budget of reserved memory. After an allocation has
// failed, the limit is the number of bytes that the device really has.
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

    // Note that the allocator could reserve no more than `reserved` bytes on the device.
    void turned_out(Bytes reserved) noexcept { found_ = reserved; }

    // Forget the limit that `turned_out` noted, because the program was given another budget.
    void forget() noexcept { found_.reset(); }

    bool limited() const noexcept { return is_the_budget || found_; }

    // Make a free block for an allocation of `nbytes`, if possible. Do nothing if reserved memory
    // is not limited.
    void find_place(Bytes nbytes);

    // Return the number of free blocks that were made by evicting values.
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
    // Blocks at the last query of the allocator. Blocks marked `used` are not memory of the
    // driver's storages and cannot be evicted.
    Segments told_;
    Bytes told_reserved_ = -1;
    int since_ = 0;  // searches without a free block since the last query
    // Number of free blocks of each size, at least.
    std::map<Bytes, int> gaps_;
    int places_ = 0;
};

}  // namespace rekindle
