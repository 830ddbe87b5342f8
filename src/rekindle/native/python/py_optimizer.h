// Python module functions that find the tensors that an optimizer step reads and writes, in one
// pass over the optimizer's parameter groups and state.
#pragma once

struct _object;

namespace rekindle {

_object* tensors_within(_object* arguments);
_object* register_tensors(_object* arguments);
_object* begin_optimizer_step(_object* arguments);
_object* save_before_optimizer_step(_object* arguments);

}  // namespace rekindle
