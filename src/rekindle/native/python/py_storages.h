// Python module functions by which Python announces that code reads, writes, resizes or exchanges
// storages of the program.
#pragma once

struct _object;

namespace rekindle {

_object* keep(_object* arguments);
_object* bring_back(_object* arguments);
_object* pin_exposed_address(_object* arguments);
_object* about_to_resize(_object* arguments);
_object* resized(_object* arguments);
_object* mark_externally_writable(_object* arguments);
_object* about_to_write_unseen(_object* arguments);
_object* version_raised(_object* arguments);
_object* suspend_origin_tracking(_object* arguments);
_object* resume_origin_tracking(_object* arguments);

}  // namespace rekindle
