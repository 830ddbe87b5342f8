// Counts what PyTorch's allocator gives out on the CPU, to whomever: a wrapper around the one that
// was there, for all threads and for good. Some nanoseconds an allocation.
#pragma once

#include <c10/core/Allocator.h>

#include "../base/types.h"

namespace rekindle {

// From now on it counts. Not where somebody else's allocator insists on being the one, or where
// nobody can tell the size of a piece: then it does nothing.
void count_allocations();
// Whether it counts now.
bool allocations_are_counted() noexcept;
// How memory goes that came from the allocator for the CPU which was there, and from the one that
// counts.
c10::DeleterFnPtr allocators_own() noexcept;
c10::DeleterFnPtr counting_ones_own() noexcept;
// Bytes given out and not returned since it counts; less than none if older ones came back.
Bytes allocated_now() noexcept;
// The most of that since `watch_allocations`.
Bytes allocated_at_most() noexcept;
// Looks for the most from now on.
void watch_allocations() noexcept;

}  // namespace rekindle
