// Module functions for `evict="anything"` and for memory that Python code reads.
#pragma once

struct _object;

namespace rekindle {

_object* evict_anything(_object* arguments);
_object* placeholders(_object* arguments);
_object* record_without_grad(_object* arguments);
_object* lock_there(_object* arguments);
_object* unlock_there(_object* arguments);

}  // namespace rekindle
