// Measures the workspaces of operators on the CPU: a wrapper around PyTorch's CPU allocator counts
// what is allocated while an operator runs, in any thread. The wrapper is installed once and for
// good. It costs nothing while nothing is measured. While a budget is active on the CPU, it
// allocates from the arena.
#pragma once

#include <c10/core/Allocator.h>

#include "../base/types.h"

namespace rekindle {

// Bytes allocated during a measurement, as requested.
struct GivenOutInside final {
    Bytes now = 0;   // Not freed yet.
    Bytes most = 0;  // Largest value of `now`.
};

// Install the wrapper. Has no effect if another allocator was registered with a higher priority.
void count_allocations();
// Return true if the wrapper is the current allocator.
bool allocations_are_counted() noexcept;
// Return the deleter of the wrapped CPU allocator, and that of the wrapper. The wrapper's own
// deleter is on memory allocated during a measurement or from the arena.
c10::DeleterFnPtr allocators_own() noexcept;
c10::DeleterFnPtr counting_ones_own() noexcept;
// Begin to measure an operator. One at a time.
void watch_allocations();
// End the measurement and return it.
GivenOutInside watched_allocations() noexcept;
// For tests: begin or end a tally of all allocations, also while operators are measured.
void tally_allocations(bool tallies);
// Return the tally so far. Its `most` restarts at each call.
GivenOutInside tallied_allocations() noexcept;

}  // namespace rekindle
