// What is evicted is overwritten before it goes, to find a reader that comes too late. Twin of
// rekindle.pytorch.online._poison.
#pragma once

#include "memory.h"

namespace rekindle {

// Whether the environment asks for it (REKINDLE_POISON).
bool poisons() noexcept;
// Every byte of `home` is 0xFF: numbers that are none.
void poison(const Home& home);

}  // namespace rekindle
