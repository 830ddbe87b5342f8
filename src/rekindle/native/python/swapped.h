// What Python asks of a driver that swaps.
#pragma once

struct _object;

namespace rekindle {

_object* swap(_object* arguments);
_object* swapped(_object* arguments);

}  // namespace rekindle
