// Operators that have no room as a whole: NOTE [Values without room] in
// dispatch/sliced_operation.h.
#include "operation.h"
#include "sliced_operation.h"

namespace rekindle {

// Run the operator while some value has no room. First try what needs no eviction: a value that is
// read in slices is not restored for that, and an operator that found no room before runs in slices
// at once.
void Operation::run_whole_or_in_slices() {
    SlicedOperation sliced(session_, facts_, call_, parsed_);
    // A result without a recipe cannot leave memory again.
    const bool stays = !recording_ && session_.slices;
    if ((sliced.reads_value_without_room() || sliced.has_no_room() ||
         (stays && sliced.leaves_no_room(lock_))) &&
        run_in_slices(false)) {
        return;
    }
    const std::optional<OutOfBudgetError> shortage = out_of_budget_of([&] {
        bring_inputs();
        run_with_inputs();
    });
    if (shortage && (started_ || !run_in_slices(true))) {
        throw OutOfBudgetError(*shortage);
    }
}

// Run the operator in slices, or note its result as a value without room. Return false, and change
// nothing, if neither is possible. observed: the learner knows of this operator already.
bool Operation::run_in_slices(bool observed) {
    SlicedOperation sliced(session_, facts_, call_, parsed_);
    if (!sliced.may()) {
        return false;
    }
    const bool takes_over = parsed_.takes_over;
    if (takes_over) {
        parsed_.leave_first();
        parsed_.signature = signature_of(call_, parsed_);
    }
    const auto attempt = [&] {
        sliced.find_slicing(lock_);
        if (!sliced.has_slices()) {
            return false;
        }
        retry_evicting_held([&] { know_inputs(); });
        if (!observed) {
            register_tensor();
        }
        needed_ = sliced.bytes_of_results();
        for (const Geometry& each : parsed_.signature->geometries) {
            needed_ += each.nbytes();  // what is not in memory thanks to slices
        }
        if (foreign_ && !take_private_inputs()) {
            return false;
        }
        return sliced.run(inputs_, recording_, grad_mode_, lock_);
    };
    const bool done = attempt();
    if (!done && takes_over) {
        parsed_.take_over();
        parsed_.signature = signature_of(call_, parsed_);
    }
    return done;
}

}  // namespace rekindle
