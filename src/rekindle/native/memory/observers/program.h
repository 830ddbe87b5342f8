// Functions of the core that call Python. They are defined in python/program.cpp.
//
// These functions take the GIL. They must be called without the session mutex, unless a comment
// says otherwise.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "observers.h"

// Python's `PyObject`, declared as in Python.h.
struct _object;

namespace rekindle {

// Set the Python object whose methods these functions call, and which turns errors of the core into
// Python exceptions. Must be called once.
void init_callbacks(_object* answers);
// Return the source line of the program that runs in this thread.
ProgramLine program_line();
// Pass the measured samples of memory in use over time to Python.
void notify_samples(Observers& observers);
// Notify Python that weights were seen for the first time. Python then registers the other tensors
// of their model, and the state of their optimizer.
void notify_owners(Observers& observers);
// Notify Python that many values were recomputed. Python may warn that this takes too much time.
void notify_losses(Observers& observers);
// Notify Python that a range of the profiler begins or ends during an optimizer step.
void notify_range(const Observers& observers, bool ends);

// Make room in memory: move the backup copies that could undo the running optimizer step out of the
// budget's memory. Return true if there were such copies.
bool move_copies_out(const Observers& observers);

// Let Python watch this thread, in which the operator `name` is about to run for the first time.
// Return why the operator must not run a second time, or "".
std::string watch_begins(const char* name);
// The operator has run: end the watch. `read`: an operator by which it read a tensor that is not
// among its arguments, or "". Return why it must not run a second time, or "".
std::string watch_ends(const char* read);
// Raise the error for the collective `name`, which the body of a recomputed operator calls (R11,
// refuse loudly).
[[noreturn]] void refuse_collective(const char* name);

// Ask Python for learned plans of training steps that begin with the operator whose number is
// `op_id`. Other processes may have saved such plans.
void request_plans(const Observers& observers, std::int64_t op_id);

// Return true if the program started every running thread inside the budget, or the thread uses no
// tensor of the program. The runtime does not notice when other threads read user-held values, so
// it must not evict these.
bool all_threads_are_known(const Observers& observers);

// Wrap the saved-tensor handle `handle` for Python. Return the function that unpacks the wrapped
// handle, and the wrapped handle.
std::pair<c10::SafePyObject, c10::SafePyObject> unpacked_by_python(
    std::unique_ptr<torch::autograd::SavedVariableHooks> handle
);
// Unpack the saved tensor of `handle`, a handle that `unpacked_by_python` wrapped for Python.
at::Tensor unpack(_object* handle);

// Notify Python that a session and all of its handles are destroyed.
void notify_gone() noexcept;

}  // namespace rekindle
