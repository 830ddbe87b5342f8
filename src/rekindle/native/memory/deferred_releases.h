// Defers the destruction of sessions whose last reference is dropped where waiting for the session
// mutex could deadlock.
//
// Scenario: a thread that copies values to the host runs Python's garbage collector, which drops a
// session. Another thread holds the session mutex and waits for that copy.
#pragma once

#include "session.h"

namespace rekindle {

// Release the reference to `session` (the state of one budget) without waiting for the session
// mutex. If another thread holds the mutex, `release_deferred` releases the reference later.
void release_without_waiting(c10::intrusive_ptr<Session> session) noexcept;
// Release the references to sessions that `release_without_waiting` could not release. The caller
// must not hold the session mutex.
void release_deferred() noexcept;

}  // namespace rekindle
