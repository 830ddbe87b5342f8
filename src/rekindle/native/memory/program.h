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

#include "../memory/driver.h"
#include "../memory/own_policy.h"

// Python's `PyObject`, declared as in Python.h.
struct _object;

namespace rekindle {

// Set the Python object whose methods these functions call, and which turns errors of the core into
// Python exceptions. Must be called once.
void init_callbacks(_object* answers);
// Take a snapshot of a new peak of memory, with the current line of the program. Errors that Python
// raises are printed, except those that end the program.
void note_peak(Driver& driver);
// Return the source line of the program that runs in this thread.
ProgramLine program_line();
// Pass the measured samples of memory in use over time to Python.
void notify_samples(Driver& driver);
// Notify Python that weights were seen for the first time. Python then registers the other tensors
// of their model, and the state of their optimizer.
void notify_owners(Driver& driver);
// Notify Python that many values were recomputed. Python may warn that this takes too much time.
void notify_losses(Driver& driver);
// Notify Python that operators ran. Python then notes the current source line of the program.
void notify_places(Driver& driver);
// Let Python warn that a copy to or from the host failed.
void notify_complaint(Driver& driver);
// Notify Python that a range of the profiler begins or ends during an optimizer step.
void notify_range(const Driver& driver, bool ends);

// Deliver queued events to the user's own policy in Python. Throws the errors that the policy
// raises.
inline void notify_policy(const Driver& driver) {
    if (driver.own_policy != nullptr) [[unlikely]] {
        driver.own_policy->deliver_events();
    }
}

// Deliver all pending notifications of `driver` to Python.
inline void notify(Driver& driver) {
    if (driver.observers.peak_watch.due && !looks_later()) [[unlikely]] {
        note_peak(driver);
    }
    if (driver.observers.due.samples_due) [[unlikely]] {
        notify_samples(driver);
    }
    if (driver.observers.due.owners_due) [[unlikely]] {
        notify_owners(driver);
    }
    if (driver.observers.recomputations >= driver.observers.due.look_at_losses_at) [[unlikely]] {
        notify_losses(driver);
    }
    if (driver.observers.due.places_due) [[unlikely]] {
        notify_places(driver);
    }
    if (driver.events.swapper != nullptr && driver.events.swapper->complaint_due) [[unlikely]] {
        notify_complaint(driver);
    }
    notify_policy(driver);
}

// Make room in memory: move the backup copies that could undo the running optimizer step out of the
// budget's memory. Return true if there were such copies.
bool move_copies_out(const Driver& driver);

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
void request_plans(const Driver& driver, std::int64_t op_id);

// Return true if the program started every running thread inside the budget, or the thread uses no
// tensor of the program. The runtime does not notice when other threads read user-held values, so
// it must not evict these.
bool all_threads_are_known(const Driver& driver);

// Wrap the saved-tensor handle `handle` for Python. Return the function that unpacks the wrapped
// handle, and the wrapped handle.
std::pair<c10::SafePyObject, c10::SafePyObject> unpacked_by_python(
    std::unique_ptr<torch::autograd::SavedVariableHooks> handle
);
// Unpack the saved tensor of `handle`, a handle that `unpacked_by_python` wrapped for Python.
at::Tensor unpack(_object* handle);

// Notify Python that a driver and all of its handles are destroyed.
void notify_gone() noexcept;

// Run `f`, and turn errors of the core into Python exceptions. `f` must release the session mutex
// before it throws.
template <class F>
auto translate_errors(Driver& driver, F&& f) {
    try {
        return std::forward<F>(f)();
    } catch (const Error& error) {
        error.raise(driver);
    }
}

}  // namespace rekindle
