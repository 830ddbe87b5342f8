// Module functions that record the events of a program. Python builds traces from them.
#pragma once

struct _object;

namespace rekindle {

struct Transcript;

// Return `transcript` as a tuple; see `written_down`.
_object* words_of(const Transcript& transcript);

_object* write_down(_object* arguments);
_object* written_down(_object* arguments);
_object* write_no_more(_object* arguments);

}  // namespace rekindle
