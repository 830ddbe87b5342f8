// Makes evicted tensors readable for PyTorch's profiler.
//
// NOTE [Profilers read addresses]
//
// Scenario: with `record_shapes=True` the profiler reads the address of each operand before the
// operator begins, so before an evicted operand is recomputed. The storage of an evicted tensor
// raises an error when its address is read. With such an error, the profiler would have an
// incomplete event. The end of the event would fail, or the profiler would assign shapes to wrong
// operators.
//
// So while the profiler's callback runs, the storage of an evicted tensor raises no error, and
// returns a null address. Nothing is recomputed for a profiler, so profiling does not change which
// values a program recomputes.
#pragma once

struct _object;

namespace rekindle {

_object* profiler_starts(_object* arguments);
_object* profiler_stops(_object* arguments);
_object* profilers_are_over(_object* arguments);

}  // namespace rekindle
