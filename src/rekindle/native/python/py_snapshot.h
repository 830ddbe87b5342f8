// Python module functions for snapshots: lists of the storages in memory at one time.
#pragma once

// Python's `PyObject`, declared as in Python.h.
struct _object;

namespace rekindle {

_object* add_module_tensor(_object* arguments);
_object* has_new_peak(_object* arguments);
_object* note_states(_object* arguments);
_object* peak_snapshot(_object* arguments);
_object* snapshot(_object* arguments);
_object* expect_peak(_object* arguments);
_object* program_tensors(_object* arguments);

}  // namespace rekindle
