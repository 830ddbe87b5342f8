// What Python asks of the core to be written down.
#pragma once

struct _object;

namespace rekindle {

struct Transcript;

// As tuples of Python's have it: see `written_down`.
_object* words_of(const Transcript& transcript);

_object* write_down(_object* arguments);
_object* written_down(_object* arguments);
_object* write_no_more(_object* arguments);

}  // namespace rekindle
