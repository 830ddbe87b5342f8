// Counts what PyTorch's allocator gives out on the CPU while an operator runs, to whomever: a
// wrapper around the one that was there, for all threads and for good. Costs nothing while nobody
// watches. Within a budget on the CPU the memory comes from the arena.
#pragma once

#include <c10/core/Allocator.h>

#include "../base/types.h"

namespace rekindle {

// Of what was given out since somebody watches, in bytes as they were asked for.
struct GivenOutInside final {
    Bytes now = 0;   // not returned yet
    Bytes most = 0;  // at once
};

// From now on somebody may watch. Not where somebody else's allocator insists on being the one.
void count_allocations();
// Whether that is so.
bool allocations_are_counted() noexcept;
// How memory goes that came from the allocator for the CPU which was there, and what was given out
// while somebody watched.
c10::DeleterFnPtr allocators_own() noexcept;
c10::DeleterFnPtr counting_ones_own() noexcept;
// An operator begins to run; one at a time.
void watch_allocations();
// It ended. What it was given.
GivenOutInside watched_allocations() noexcept;
// For tests: from now on somebody adds up all that is given out, also while operators are watched.
void tally_allocations(bool tallies);
// So far; the most at once since this was last asked.
GivenOutInside tallied_allocations() noexcept;

}  // namespace rekindle
