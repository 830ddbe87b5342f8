// Makes room for an optimizer step beyond what evictions give.
#pragma once

#include <optional>
#include <utility>

#include "../../base/mutex.h"
#include "../../ops/errors.h"
#include "../observers/program.h"
#include "frees.h"

namespace rekindle {

// Run `step` while the budget has no limit.
template <class Step>
void without_limit(Engine& engine, Step&& step) {
    const Bytes budget = std::exchange(engine.budget, UNLIMITED);
    try {
        step();
    } catch (...) {
        engine.budget = budget;
        throw;
    }
    engine.budget = budget;
}

// Run `step`. If it does not fit into the budget, move the backup copies (those that could undo the
// running optimizer step) out of the budget's memory, and run `step` once more. If an optimizer
// step must end, `step` exceeds the budget then. Releases the session mutex for that move.
template <class Step>
void or_without_copies(Frees& frees, Locked& lock, Step&& step) {
    std::optional<OutOfBudgetError> shortage = out_of_budget_of(step);
    if (!shortage) {
        return;
    }
    bool moved = false;
    // true if the running optimizer step can be undone, so that there are backup copies
    if (frees.registry.observers.due.tell_ranges) {
        const Unlocked others(lock);
        moved = move_copies_out(frees.registry.observers);
    }
    frees.registry.drain();
    if (!moved && !frees.events.must_finish.is_set()) {
        throw OutOfBudgetError(*std::move(shortage));
    }
    frees.process_pending();
    if (moved) {
        step();
    } else {
        without_limit(frees.engine, step);
    }
}

}  // namespace rekindle
