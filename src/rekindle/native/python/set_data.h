// Sees assignments to `tensor.data`, which give a tensor other memory without an operator.
#pragma once

// Forward declaration of PyObject as in Python.h.
struct _object;

namespace rekindle {

// Let the setter of the attribute `data` of `tensor_type` (torch.Tensor) report to the sessions.
// Called once. The getter stays as it is.
void see_set_data(_object* tensor_type);
// Call `watcher` with each tensor whose `data` is about to be assigned. None: call nothing.
void watch_set_data(_object* watcher);

}  // namespace rekindle
