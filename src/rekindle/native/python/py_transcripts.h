// Python module functions that record the events of a program, from which Python builds traces.
#pragma once

struct _object;

namespace rekindle {

struct Transcript;

// Return `transcript` as the tuple that `recording` describes.
_object* words_of(const Transcript& transcript);

_object* begin_recording(_object* arguments);
_object* recording(_object* arguments);
_object* end_recording(_object* arguments);

}  // namespace rekindle
