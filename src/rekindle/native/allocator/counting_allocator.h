// Measures the workspaces of operators on the CPU: memory that an operator uses internally. A
// wrapper around PyTorch's CPU allocator counts the bytes that any thread allocates while an
// operator runs. The wrapper is installed once and stays installed. It costs nothing while nothing
// is measured. While a budget is active on the CPU, the wrapper allocates from the arena.
//
// A measurement can have a limit. Before an allocation exceeds it, memory can be freed to move the
// limit. If that is not enough the allocation fails, so an operator whose workspace is unknown
// cannot exceed the budget.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/FunctionRef.h>

#include <optional>

#include "../base/types.h"

namespace rekindle {

// Bytes allocated during a measurement, before rounding by the allocator.
struct GivenOutInside final {
    Bytes now = 0;   // Bytes allocated and not freed yet.
    Bytes most = 0;  // Largest value of `now`.
    // Value that `now` would have had if the limit had not refused an allocation; 0 if the limit
    // refused none.
    Bytes refused = 0;
};

// Install the wrapper as PyTorch's CPU allocator, unless an allocator of higher priority is
// registered.
void count_allocations();
// Return true if the wrapper is PyTorch's current CPU allocator.
bool allocations_are_counted() noexcept;
// `pytorchs_deleter` returns the deleter of the wrapped CPU allocator; `counting_deleter` returns
// the deleter of the wrapper. Only memory allocated during a measurement or from the arena has the
// deleter of the wrapper.
c10::DeleterFnPtr pytorchs_deleter() noexcept;
c10::DeleterFnPtr counting_deleter() noexcept;
// Frees memory, so that the measured operator can have the given number of bytes in all, and
// returns the limit from then on.
using MoveLimit = c10::function_ref<Bytes(Bytes)>;
// Begin to measure an operator, which this thread runs. Only one operator can be measured at a
// time. An allocation of this thread fails with `std::bad_alloc` if `now` would exceed `limit`,
// also after `move`, which is called until the measurement ends.
void watch_allocations(Bytes limit, std::optional<MoveLimit> move);
// End the measurement and return the bytes that the operator allocated.
GivenOutInside watched_allocations() noexcept;

// Scope in which each allocation of this thread of more than `most` bytes fails with
// `std::bad_alloc`.
class AllocationLimit final {
public:
    explicit AllocationLimit(Bytes most) noexcept;
    AllocationLimit(const AllocationLimit&) = delete;
    AllocationLimit& operator=(const AllocationLimit&) = delete;
    ~AllocationLimit();

    // Throw `std::bad_alloc` if a scope of this thread forbids to allocate `bytes`.
    static void check(Bytes bytes);

    bool has_refused() const noexcept { return refused_; }

private:
    const Bytes most_;
    bool refused_ = false;
    AllocationLimit*& innermost_;  // of this thread
    AllocationLimit* const outer_;
};

// For tests: begin or end a separate count of all allocations, the tally.
void tally_allocations(bool tallies);
// For tests: return the tally. Its `most` is the peak since the last call of this function.
GivenOutInside tallied_allocations() noexcept;

}  // namespace rekindle
