// Defers the destruction of drivers whose last reference is dropped where waiting for the core's
// lock could deadlock.
//
// Scenario: a thread that copies values to the host runs Python's garbage collector, which drops a
// driver. The thread that has the lock waits for that copy.
#pragma once

#include "driver.h"

namespace rekindle {

// Drop a reference. Never waits for the lock: if it is taken, `release_deferred` drops the
// reference later.
void let_go(c10::intrusive_ptr<Driver> driver) noexcept;
// Drop the deferred references. Must be called without the lock.
void release_deferred() noexcept;

}  // namespace rekindle
