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
#include <unordered_map>
#include <vector>

#include "../../base/types.h"
#include "frees.h"
#include "neighbors.h"

namespace rekindle {

class PythonChooser;  // NOLINT(cppcoreguidelines-virtual-class-destructor): it is final

// Return all blocks of the budget's device by segment, as the device's allocator reports them;
// empty if it reports none. Needs the session mutex, and releases it while Python runs. Defined in
// python/program.cpp.
Segments segments_of(Frees& frees);

class Reserved final {
public:
    // `own_policy`: a policy written in Python, or null.
    Reserved(Frees& frees, PythonChooser* own_policy)
        : engine_(frees.engine),
          registry_(frees.registry),
          device_(frees.registry.device),
          events_(frees.events),
          frees_(frees),
          own_policy_(own_policy) {}

    // True if the budget limits the memory that the device's allocator reserves, and not the memory
    // of tensors.
    bool is_the_budget = false;

    // Record that the device's allocator could not reserve more than `reserved` bytes. This number
    // is the new limit of reserved memory.
    void turned_out(Bytes reserved) noexcept { found_ = reserved; }

    // Forget the limit of reserved memory that `turned_out` set, because the program set another
    // budget.
    void forget() noexcept { found_.reset(); }

    bool limited() const noexcept { return is_the_budget || found_; }

    // Make a free block on the device for an allocation of `nbytes`, if possible. Do nothing if
    // reserved memory is not limited.
    void find_place(Bytes nbytes);

    // Evict the cheapest values that lie next to each other in device memory, to free `nbytes` in
    // one piece. Return true if something was evicted.
    bool evict_neighbors(Bytes nbytes);

    // Return how often values were evicted to make a free block for an allocation.
    int places() const noexcept { return places_; }

private:
    // Free a block of `nbytes` on the device in the cheaper of two ways: evict values that lie next
    // to each other, or empty whole segments of the allocator with `missing` bytes in all. The
    // caller returns emptied segments to the device.
    Way evict_for_place(Bytes nbytes, Bytes missing, Segments segments);
    std::unordered_map<Bytes, Storage*> price(Segments& segments);
    Bytes missing(Bytes nbytes) const;
    bool take(Bytes nbytes);
    void make_by_sum(Bytes nbytes);
    void give_back();
    void ask_allocator();
    Segments now() const;
    void count_free_blocks();

    Engine& engine_;
    Registry& registry_;
    Device& device_;
    Events& events_;
    Frees& frees_;
    PythonChooser* const own_policy_;
    std::optional<Bytes> found_;
    // Blocks of the device's allocator at its last query. Blocks marked `used` are not memory of
    // the budget's storages and cannot be evicted.
    Segments segments_;
    Bytes reserved_then_ = -1;
    // number of searches for a free block without success since the last query of the allocator
    int since_ = 0;
    // For each block size, a lower bound of the number of free blocks on the device.
    std::map<Bytes, int> n_free_blocks_;
    int places_ = 0;
};

}  // namespace rekindle
