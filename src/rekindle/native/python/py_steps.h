// Module functions that Python calls around optimizer steps and for the figures of each step.
#pragma once

struct _object;

namespace rekindle {

_object* take_samples(_object* arguments);
_object* space_samples(_object* arguments);
_object* set_budget(_object* arguments);
_object* backoff(_object* arguments);
_object* keep_reserved(_object* arguments);
_object* new_parameters(_object* arguments);
_object* release_recompute_sources(_object* arguments);

}  // namespace rekindle
