// Evicts user-held values (values that variables of the program refer to) as a last resort
// (`evict="auto"`).
//
// NOTE [Evicting user-held values as a last resort]
//
// Rationale: values that the program's variables refer to are evicted only where the alternative is
// `OutOfBudget`. A request that does not fit is tried a second time. During the second try
// user-held values are candidates for eviction.
//
// Values that are being read are not candidates: the operands of running operators (`Reader`), and
// the tensors that rekindle.pytorch.held reports as read by the program's own functions. Only
// floating-point values made by operators are candidates, because Python code reads integers and
// single numbers directly.
//
// Scenario: a list keeps every hidden state of a recurrent network. All values that only autograd
// holds are evicted, and the next operator still does not fit. The operator is retried, hidden
// states of the list are evicted, and a later access recomputes them.
//
// With `evict="anything"` user-held values are always candidates; see `held_eviction.h`.
#pragma once

#include <c10/util/SmallVector.h>

#include <optional>
#include <utility>

#include "../base/mutex.h"
#include "../torch/geometry.h"
#include "held/held.h"
#include "notify.h"
#include "observers/program.h"
#include "room/without_copies.h"
#include "session.h"

namespace rekindle {

// Prepare for an eviction that may include user-held values.
inline void about_to_let_go(Session& session, Locked& lock) {
    if (session.held.eviction && session.held.eviction->open) {
        session.held.eviction->about_to_let_go(lock);
    }
}

// Run `step` while user-held values may be evicted, except those that are being read. The caller
// has registered its own operands as a `Reader`. Releases the session mutex for a moment. Return
// false, without running `step`, if no user-held value may be evicted now.
template <class Step>
bool with_held_evictable(Session& session, Locked& lock, Step&& step) {
    if (!session.held.evicts_last) {
        return false;
    }
    bool known = false;
    {
        const Unlocked others(lock);
        known = all_threads_are_known(session.observers);
    }
    session.registry.drain();
    if (!known || !session.held.evicts_last || session.in_progress.reading_anything != 0) {
        return false;
    }
    const EvictHeldLast resort(session.held);
    step();
    return true;
}

// Run `step`. If it does not fit into the budget, run it once more while user-held values may be
// evicted.
template <class Step>
void retry_evicting_held(Session& session, Locked& lock, Step&& step) {
    or_without_copies(session.frees, lock, [&] {
        // with `evict="anything"`, user-held values are candidates already, so a second try would
        // not help
        if (session.held.eviction) [[unlikely]] {
            about_to_let_go(session, lock);
            session.held.eviction->attempt(step);
            return;
        }
        std::optional<OutOfBudgetError> shortage = out_of_budget_of(step);
        if (!shortage) [[likely]] {
            return;
        }
        if (!with_held_evictable(session, lock, step)) {
            throw OutOfBudgetError(*std::move(shortage));
        }
    });
}

// For tests: evict every value that may be evicted before the operator runs.
inline void evict_for_tests(Session& session, Locked& lock) {
    about_to_let_go(session, lock);
    session.room.evict_all();
    with_held_evictable(session, lock, [&] { session.room.evict_all(); });
}

// Restore the contents of `tensor`, if they were evicted while the program held the tensor.
inline void bring_back(Session& session, Locked& lock, const c10::TensorImpl& tensor) {
    if (session.registry.placeholders != 0 && has_memory(tensor)) [[unlikely]] {
        c10::StorageImpl& storage_impl = *tensor.unsafe_storage().unsafeGetStorageImpl();
        if (is_placeholder(storage_impl)) {
            retry_evicting_held(session, lock, [&] { session.room.bring_back(storage_impl); });
        }
    }
}

// Return the record of the storage of `tensor`; null if it has no memory. Register the storage if
// it has no record yet. If it does not fit into the budget otherwise, evict user-held values to
// make room.
inline StorageRecord* find_or_register(
    Session& session, Locked& lock, const c10::TensorImpl& tensor
) {
    const AddressEntry* found = session.registry.find(tensor);
    if (found != nullptr) {
        StorageRecord* known = found->record;
        return known != nullptr && !known->untracked ? known
                                                     : session.sources.find_or_register(tensor);
    }
    StorageRecord* record = nullptr;
    retry_evicting_held(session, lock, [&] { record = session.sources.find_or_register(tensor); });
    return record;
}

// Take the session mutex, and run `act`, the body of a function that Python calls. Before that,
// process storages and handles that were freed, because `act` may evict values.
template <class F>
auto settled(Session& session, F&& act) {
    return translate_errors(session, [&] {
        Locked lock;
        about_to_let_go(session, lock);
        session.frees.process_pending();
        return std::forward<F>(act)(lock);
    });
}

}  // namespace rekindle
