// Delivers pending notifications to Python, and turns errors of the core into Python exceptions.
//
// These functions take the GIL. They must be called without the session mutex.
#pragma once

#include <utility>

#include "../ops/errors.h"
#include "observers/program.h"
#include "room/own_policy.h"
#include "session.h"

namespace rekindle {

// Take a snapshot of a new peak of memory, with the current line of the program. Errors that Python
// raises are printed, except those that end the program.
void note_peak(Session& session);
// Notify Python that operators ran. Python then notes the current source line of the program.
void notify_places(Session& session);
// Let Python warn that a copy to or from the host failed.
void notify_complaint(Session& session);

// Deliver queued events to the user's own policy in Python. Throws the errors that the policy
// raises.
inline void notify_policy(const Session& session) {
    if (session.own_policy != nullptr) [[unlikely]] {
        session.own_policy->deliver_events();
    }
}

// Deliver all pending notifications of `session` to Python.
inline void notify(Session& session) {
    Observers& observers = session.observers;
    if (observers.peak_watch.due && !looks_later()) [[unlikely]] {
        note_peak(session);
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
        notify_places(session);
    }
    if (session.events.swapper != nullptr && session.events.swapper->complaint_due) [[unlikely]] {
        notify_complaint(session);
    }
    notify_policy(session);
}

// Run `f`, and turn errors of the core into Python exceptions. `f` must release the session mutex
// before it throws.
template <class F>
auto translate_errors(Session& session, F&& f) {
    try {
        return std::forward<F>(f)();
    } catch (const Error& error) {
        error.raise(session);
    }
}

}  // namespace rekindle
