// Python module functions for learned plans, called between the training steps of a program.
#pragma once

struct _object;

namespace rekindle {

_object* add_plan(_object* arguments);
_object* retain_plans(_object* arguments);
_object* begin_step(_object* arguments);
_object* end_step(_object* arguments);
_object* op_ids_of_step(_object* arguments);
_object* recording_of_step(_object* arguments);

}  // namespace rekindle
