// Operators that make no memory and do no work: views of what is there.
#pragma once

#include <torch/library.h>

#include "../memory/driver.h"

namespace rekindle {

// Somebody may read a view of `whole`: its memory counts. Needs the core's lock.
void meet_whole(Driver& driver, Locked& lock, const c10::TensorImpl& whole);
// Those that run often are seen without boxes around their arguments, from now on.
void see_views(torch::Library& aten);

}  // namespace rekindle
