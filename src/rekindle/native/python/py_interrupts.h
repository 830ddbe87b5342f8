// Keeps Ctrl-C that a finalizer would swallow.
#pragma once

// Forward declaration of PyObject as in Python.h.
struct _object;

namespace rekindle {

_object* interrupts_kept(_object* arguments);

}  // namespace rekindle
