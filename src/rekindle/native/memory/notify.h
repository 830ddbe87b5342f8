// Delivers pending notifications to Python, and turns errors of the core into Python exceptions.
//
// These functions take the GIL. They must be called without the session mutex.
#pragma once

#include <utility>

#include "../ops/errors.h"
#include "driver.h"
#include "observers/program.h"
#include "room/own_policy.h"

namespace rekindle {

// Take a snapshot of a new peak of memory, with the current line of the program. Errors that Python
// raises are printed, except those that end the program.
void note_peak(Driver& driver);
// Notify Python that operators ran. Python then notes the current source line of the program.
void notify_places(Driver& driver);
// Let Python warn that a copy to or from the host failed.
void notify_complaint(Driver& driver);

// Deliver queued events to the user's own policy in Python. Throws the errors that the policy
// raises.
inline void notify_policy(const Driver& driver) {
    if (driver.own_policy != nullptr) [[unlikely]] {
        driver.own_policy->deliver_events();
    }
}

// Deliver all pending notifications of `driver` to Python.
inline void notify(Driver& driver) {
    Observers& observers = driver.observers;
    if (observers.peak_watch.due && !looks_later()) [[unlikely]] {
        note_peak(driver);
    }
    if (observers.due.samples_due) [[unlikely]] {
        notify_samples(observers);
    }
    if (observers.due.owners_due) [[unlikely]] {
        notify_owners(observers);
    }
    if (observers.recomputations >= observers.due.look_at_losses_at) [[unlikely]] {
        notify_losses(observers);
    }
    if (observers.due.places_due) [[unlikely]] {
        notify_places(driver);
    }
    if (driver.events.swapper != nullptr && driver.events.swapper->complaint_due) [[unlikely]] {
        notify_complaint(driver);
    }
    notify_policy(driver);
}

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
