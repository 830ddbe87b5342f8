// Module functions for `evict="anything"` and for memory that Python code reads.
#pragma once

struct _object;

namespace rekindle {

_object* let_go_of_anything(_object* arguments);
_object* husks(_object* arguments);
_object* record_without_grad(_object* arguments);
_object* lock_there(_object* arguments);
_object* unlock_there(_object* arguments);

}  // namespace rekindle
