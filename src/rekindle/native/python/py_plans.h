// Module functions for learned plans, which Python calls between the steps of a program.
#pragma once

struct _object;

namespace rekindle {

_object* add_plan(_object* arguments);
_object* know(_object* arguments);
_object* begin_step(_object* arguments);
_object* end_step(_object* arguments);
_object* met_in_step(_object* arguments);
_object* written_in_step(_object* arguments);

}  // namespace rekindle
