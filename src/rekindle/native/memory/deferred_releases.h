// Defers the destruction of drivers whose last reference is dropped where waiting for the session
// mutex could deadlock.
//
// Scenario: a thread that copies values to the host runs Python's garbage collector, which drops a
// driver. Another thread holds the session mutex and waits for that copy.
#pragma once

#include "driver.h"

namespace rekindle {

// Drop the reference to `driver` without waiting for the session mutex. If the mutex is taken,
// `release_deferred` drops the reference later.
void let_go(c10::intrusive_ptr<Driver> driver) noexcept;
// Drop the deferred references. Must be called without the session mutex.
void release_deferred() noexcept;

}  // namespace rekindle
