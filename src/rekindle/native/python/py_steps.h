// Python module functions that are called around optimizer steps, or for the figures of a step.
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
