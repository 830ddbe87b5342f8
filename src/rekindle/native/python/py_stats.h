// Python module functions for reports on memory in use and on operators that ran.
#pragma once

struct _object;

namespace rekindle {

_object* numbers(_object* arguments);
_object* has_room(_object* arguments);
_object* devices_used(_object* arguments);
_object* set_peak(_object* arguments);
_object* evicted_bytes(_object* arguments);
_object* signatures_seen(_object* arguments);
_object* remember_workspaces(_object* arguments);
_object* take_new_workspaces(_object* arguments);
_object* repeated_calls(_object* arguments);
_object* kept(_object* arguments);
_object* last_unit(_object* arguments);
_object* reopen_trials(_object* arguments);
_object* audit(_object* arguments);
_object* recomputed_differently(_object* arguments);

}  // namespace rekindle
