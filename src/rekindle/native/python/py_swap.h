// Module functions for swapping values to the host.
#pragma once

struct _object;

namespace rekindle {

_object* swap(_object* arguments);
_object* swapped(_object* arguments);

}  // namespace rekindle
