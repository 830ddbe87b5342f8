// Module functions that record the events of a program. Python builds traces from them.
#pragma once

struct _object;

namespace rekindle {

struct Transcript;

// Return `transcript` as a tuple; see `recording`.
_object* words_of(const Transcript& transcript);

_object* begin_recording(_object* arguments);
_object* recording(_object* arguments);
_object* end_recording(_object* arguments);

}  // namespace rekindle
