// Profilers read evicted tensors.
//
// With `record_shapes=True` PyTorch's profiler reads the address of each operand before the
// operator begins, so before the operand is recomputed. The storage of an evicted tensor raises
// when it is read, and the profiler is left with half a note: its end fails, or shapes go to wrong
// operators. So its storage is readable, at a null address, while the profiler looks. What
// profilers run for is not changed by that: nothing is recomputed for them.
#pragma once

struct _object;

namespace rekindle {

_object* profiler_starts(_object* arguments);
_object* profiler_stops(_object* arguments);
_object* profilers_are_over(_object* arguments);

}  // namespace rekindle
