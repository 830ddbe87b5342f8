// Operators that return views: they allocate no memory and launch no kernel.
#pragma once

#include "../memory/session.h"

namespace rekindle {

// Count the memory of `whole`, the base of a view, against the budget from now on: the program may
// read it through the view. Needs the session mutex.
void register_base(Session& session, Locked& lock, const c10::TensorImpl& whole);
// Register kernels with typed (unboxed) arguments for the most frequent view operators. They are
// faster than the fallback.
void register_view_kernels();

}  // namespace rekindle
