// Lets a forked process read memory that was evicted before the fork.
//
// The child runs within no budget: its operators do not reach the runtime, so that they cannot
// bring memory back. Functions of Python that read memory can: they still ask the runtime.
#pragma once

#include "session.h"

namespace rekindle {

// This thread is about to fork within `session`. Bring data back that the child probably reads,
// such as the tensors of a dataset, as far as half of the budget suffices. Weights, gradients and
// optimizer state stay on the host. Does nothing if sources do not move.
void bring_for_child(Session& session) noexcept;

// fork() has just made this process, within `session`. Evict nothing any more: the child has no use
// for a budget. Let accesses to evicted memory name the fork in their errors.
void leave_in_child(Session& session) noexcept;

}  // namespace rekindle
