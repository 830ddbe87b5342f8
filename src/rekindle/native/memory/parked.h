// Drivers that nobody refers to any more, where the core's lock cannot be had at once: a thread
// that copies values may come to let go of one, as Python's garbage collector does in any thread,
// while who has the lock waits for that copy.
#pragma once

#include "driver.h"

namespace rekindle {

// One reference less. Never waits for the lock: the last one is kept for `let_parked_go` instead.
void let_go(c10::intrusive_ptr<Driver> driver) noexcept;
// Lets go of what is kept. Not with the lock.
void let_parked_go() noexcept;

}  // namespace rekindle
