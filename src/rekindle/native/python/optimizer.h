// What the step of an optimizer reads and writes, found in one pass over Python's containers.
#pragma once

struct _object;

namespace rekindle {

_object* tensors_within(_object* arguments);
_object* begin_optimizer_step(_object* arguments);
_object* save_before_optimizer_step(_object* arguments);

}  // namespace rekindle
