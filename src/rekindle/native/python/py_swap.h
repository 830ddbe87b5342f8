// Python module functions for swapping values to host memory.
#pragma once

struct _object;

namespace rekindle {

_object* swap(_object* arguments);
_object* swapped(_object* arguments);

}  // namespace rekindle
