// What the core asks of Python, or tells it. Defined in the room above, python/program.cpp. Takes
// the GIL itself; never with the core's lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SafePyObject.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "../memory/driver.h"
#include "../memory/neighbors.h"
#include "../memory/own_policy.h"
#include "../memory/swapper.h"

// As Python.h has it.
struct _object;

namespace rekindle {

// Who answers: an object of Python's, whose methods make errors of numbers. Once.
void meet_python(_object* answers);
// There is a new peak: notes who holds memory, and where the program is. What goes wrong in Python
// is printed, but for what ends the program.
void note_peak(Driver& driver);
// Which line of the program runs in this thread.
ProgramLine program_line();
// How much there was, now and then: Python takes it.
void tell_samples(Driver& driver);
// Weights were met: the rest of their model counts as well, and the state of their optimizer.
void tell_owners(Driver& driver);
// Much was recomputed: Python looks how much time that takes, and may warn.
void tell_losses(Driver& driver);
// Operators ran within the budget since this was told last: where the program is now.
void tell_places(Driver& driver);
// All blocks of the device that the budget is for, segment by segment, as its allocator has them;
// none: it does not tell. With the lock, which is given back meanwhile.
Segments segments_of(Driver& driver);
// A copy on the host failed: Python warns of it.
void tell_complaint(Driver& driver);
// A range of the profiler begins or ends amid an optimizer's step.
void tell_range(const Driver& driver, bool ends);

// The program's own policy hears what happened; what it raises is thrown.
inline void tell_policy(const Driver& driver) {
    if (driver.own_policy != nullptr) {
        driver.own_policy->tell();
    }
}

// Tells all that is due.
inline void tell(Driver& driver) {
    if (driver.peak_snapshot_due && !looks_later()) {
        note_peak(driver);
    }
    if (driver.samples_due) {
        tell_samples(driver);
    }
    if (driver.owners_due) {
        tell_owners(driver);
    }
    if (driver.recomputations >= driver.look_at_losses_at) {
        tell_losses(driver);
    }
    if (driver.places_due) {
        tell_places(driver);
    }
    if (driver.swapper != nullptr && driver.swapper->complaint_due) {
        tell_complaint(driver);
    }
    tell_policy(driver);
}

// There is no room amid an optimizer's step. Returns whether copies from which it can be undone
// have been moved out of the budget.
bool move_copies_out(const Driver& driver);

// A step begins with `met`: Python may know what comes then, of other processes.
void ask_for_lessons(const Driver& driver, std::int64_t met);

// Whether nothing runs but threads that started within the budget, or touch no tensor of the
// program's: of others nobody knows what they read.
bool all_threads_are_known(const Driver& driver);

// A function of Python's that unpacks what it is given, and `handle` for it.
std::pair<c10::SafePyObject, c10::SafePyObject> unpacked_by_python(
    std::unique_ptr<torch::autograd::SavedVariableHooks> handle
);
// What that function is given.
at::Tensor unpack(_object* handle);

// A driver is gone, and so are all handles of it: Python will hear of it.
void tell_gone(std::ptrdiff_t number) noexcept;

// Runs `f`; what it throws in numbers is raised in words. It gives the lock back itself.
template <class F>
auto in_words(Driver& driver, F&& f) {
    try {
        return std::forward<F>(f)();
    } catch (const Error& error) {
        error.raise(driver);
    }
}

}  // namespace rekindle
