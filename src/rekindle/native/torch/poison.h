// Overwrites memory before it is evicted, to reveal readers that come too late.
//
// A custom kernel that keeps an address, or a stream without a wait, reads old values for as long
// as the memory is not reused. That usually hides the error. With `REKINDLE_POISON=1` in the
// environment, such a reader gets NaNs at once.
#pragma once

#include "homes.h"

namespace rekindle {

// Return true if the environment sets REKINDLE_POISON.
bool poisons() noexcept;
// Set all bytes of `home` to 0xFF, which is NaN for floating-point types.
void poison(const Home& home);

}  // namespace rekindle
