// Module functions for `evict="anything"`, and for tensors whose memory Python code reads without
// an operator.
#pragma once

struct _object;

namespace rekindle {

_object* evict_anything(_object* arguments);
_object* placeholders(_object* arguments);
_object* record_without_grad(_object* arguments);
_object* lock_there(_object* arguments);
_object* unlock_there(_object* arguments);

}  // namespace rekindle
