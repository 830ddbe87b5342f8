// Overwrites memory before it is evicted, to reveal readers that come too late.
//
// A custom kernel that keeps an address, or a stream that does not wait, can read evicted memory.
// It reads the old values as long as the memory is not reused, which usually hides the error. With
// `REKINDLE_POISON=1` in the environment, such a reader gets NaNs at once.
#pragma once

#include "storage_ptr.h"

namespace rekindle {

// Return true if the environment variable REKINDLE_POISON is set, to something else than 0.
bool poisons() noexcept;
// Set all bytes of `storage_impl` to 0xFF, which is NaN for floating-point types.
// Memory that is shared copy-on-write stays as it is.
void poison(const StoragePtr& storage_impl);

}  // namespace rekindle
