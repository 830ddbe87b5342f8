// Defers the destruction of drivers whose last reference is dropped where waiting for the session
// mutex could deadlock.
//
// Scenario: a thread that copies values to the host runs Python's garbage collector, which drops a
// driver. Another thread holds the session mutex and waits for that copy.
#pragma once

#include "driver.h"

namespace rekindle {

// Release the reference to `driver` (the state of one budget) without waiting for the session
// mutex. If another thread holds the mutex, `release_deferred` releases the reference later.
void release_without_waiting(c10::intrusive_ptr<Driver> driver) noexcept;
// Release the references to drivers that `release_without_waiting` could not release. The caller
// must not hold the session mutex.
void release_deferred() noexcept;

}  // namespace rekindle
