// Operators that return views: they make no memory and do no work.
#pragma once

#include <torch/library.h>

#include "../memory/driver.h"

namespace rekindle {

// Count the memory of `whole` from now on, because a view of it may be read. Needs the session
// mutex.
void register_base(Driver& driver, Locked& lock, const c10::TensorImpl& whole);
// Register unboxed kernels for the most frequent views, which are faster than the fallback.
void register_view_kernels(torch::Library& aten);

}  // namespace rekindle
