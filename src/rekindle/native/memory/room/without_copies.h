// Makes room by moving the backup copies of an optimizer step out of the budget's memory.
#pragma once

#include <optional>
#include <utility>

#include "../../base/mutex.h"
#include "../../ops/errors.h"
#include "../observers/program.h"
#include "frees.h"

namespace rekindle {

// Run `step`. If it does not fit into the budget, move the backup copies (those that could undo the
// running optimizer step) out of the budget's memory, and run `step` once more. Releases the
// session mutex for that move.
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
    if (!moved) {
        frees.registry.drain();
        throw OutOfBudgetError(*std::move(shortage));
    }
    frees.process_pending();
    step();
}

}  // namespace rekindle
