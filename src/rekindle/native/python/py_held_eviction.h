// Python module functions for `evict="anything"`, and for tensors whose memory Python code reads
// without calling an operator.
#pragma once

struct _object;

namespace rekindle {

_object* evict_anything(_object* arguments);
_object* placeholders(_object* arguments);
_object* record_without_grad(_object* arguments);
_object* begin_reading(_object* arguments);
_object* end_reading(_object* arguments);

}  // namespace rekindle
