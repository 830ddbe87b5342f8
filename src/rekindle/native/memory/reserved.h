// What a device's allocator reserves, kept within a limit: what is in the place of a result is
// evicted before the result is made.
//
// A budget counts bytes, and an allocator needs them side by side: it may reserve twice what it
// gives out. Here it grows within the limit only. Beyond it the cheapest way to a place in one
// piece is taken before the allocator is asked, which would first give all that it keeps back to
// the device, and wait for that.
//
// The limit is the budget where that is one of reserved memory, and what a device turned out to
// have where an allocation failed.
//
// Missing: which stream a free block belongs to, and results of a MiB and less, which live in
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

    // The budget is one of what the allocator reserves.
    bool is_the_budget = false;

    // The device turned out to have so much, and no more, for the allocator.
    void turned_out(Bytes reserved) noexcept { found_ = reserved; }

    // The program was given another budget: nothing is known of the device.
    void forget() noexcept { found_.reset(); }

    bool limited() const noexcept { return is_the_budget || found_; }

    // `nbytes` are about to be allocated in one piece: a place is made for them, if it can be.
    void find_place(Bytes nbytes);

    // For how many places something was evicted.
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
    Segments told_;  // by the allocator when it was last asked: in use there is what others have
    Bytes told_reserved_ = -1;
    int since_ = 0;              // how often no place was found since then
    std::map<Bytes, int> gaps_;  // free pieces by their bytes: how many there are at least
    int places_ = 0;
};

}  // namespace rekindle
