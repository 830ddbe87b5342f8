// What is evicted is overwritten before it goes, to find a reader that comes too late.
//
// A kernel of one's own that keeps an address, a stream that nobody waits for: what they read is
// there as long as nothing else takes its place, which hides the mistake for most of the time. With
// `REKINDLE_POISON=1` in the environment they read numbers that are none, at once.
#pragma once

#include "homes.h"

namespace rekindle {

// Whether the environment asks for it (REKINDLE_POISON).
bool poisons() noexcept;
// Every byte of `home` is 0xFF: numbers that are none.
void poison(const Home& home);

}  // namespace rekindle
