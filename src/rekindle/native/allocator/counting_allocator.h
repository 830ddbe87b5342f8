// Measures the workspaces of operators on the CPU. A wrapper around PyTorch's CPU allocator counts
// the bytes allocated while an operator runs, in any thread. The wrapper is installed once and
// stays installed. It costs nothing while nothing is measured. While a budget is active on the CPU,
// the wrapper allocates from the arena.
//
// The measurement can have a limit. An allocation that would exceed it fails, so an operator whose
// workspace is unknown cannot exceed the budget.
#pragma once

#include <c10/core/Allocator.h>

#include "../base/types.h"

namespace rekindle {

// Bytes allocated during a measurement, before rounding by the allocator.
struct GivenOutInside final {
    Bytes now = 0;   // Allocated and not freed yet.
    Bytes most = 0;  // Largest value of `now`.
    // Value that `now` would have had if the limit had not refused an allocation; 0 if it refused
    // none.
    Bytes refused = 0;
};

// Install the wrapper as PyTorch's CPU allocator, unless an allocator of higher priority is
// registered.
void count_allocations();
// Return true if the wrapper is the current allocator.
bool allocations_are_counted() noexcept;
// `allocators_own` returns the deleter of the wrapped CPU allocator; `counting_ones_own` returns
// the deleter of the wrapper. Only memory allocated during a measurement or from the arena has the
// latter.
c10::DeleterFnPtr allocators_own() noexcept;
c10::DeleterFnPtr counting_ones_own() noexcept;
// Begin to measure an operator, which this thread runs. Only one can be measured at a time. An
// allocation of this thread fails with `std::bad_alloc` if `now` would exceed `limit`.
void watch_allocations(Bytes limit);
// End the measurement and return the bytes that the operator allocated.
GivenOutInside watched_allocations() noexcept;
// For tests: begin or end a separate count (tally) of all allocations.
void tally_allocations(bool tallies);
// For tests: return the tally so far. Its `most` restarts at each call.
GivenOutInside tallied_allocations() noexcept;

}  // namespace rekindle
