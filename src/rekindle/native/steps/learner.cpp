// Follows learned plans during a step; see learner.h.
#include "learner.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "../memory/notify.h"
#include "../memory/recording.h"
#include "../torch/backward.h"
#include "../torch/raised.h"

namespace rekindle {

namespace {

constexpr std::size_t MOST_ASKED = std::size_t{1} << 16;

// Return the bits `GRAPH` and `BACKWARD` for the number of an operator: whether it is part of an
// autograd graph, and whether it runs in a backward pass. Operators outside of the graph may differ
// from step to step, because they do not affect gradients.
std::int64_t part_in_graph(const ParsedCall& parsed) {
    if (in_backward_pass()) {
        return GRAPH | BACKWARD;
    }
    const Facts& facts = parsed.facts;
    if (facts.has(Traits::ROUTING) || !facts.returns_tensors || !c10::GradMode::is_enabled()) {
        return 0;
    }
    const auto requires_grad = [](const c10::TensorImpl* each) { return each->requires_grad(); };
    const auto& tensors = parsed.tensors;
    return std::ranges::any_of(tensors, requires_grad) ? GRAPH : 0;
}

// Return true if the numbers in `bounds` never decrease, and lie between 0 and `end`.
bool go_up(std::span<const std::int64_t> bounds, std::size_t end) noexcept {
    std::int64_t last = 0;
    for (const std::int64_t bound : bounds) {
        if (bound < last) {
            return false;
        }
        last = bound;
    }
    return std::cmp_less_equal(last, end);
}

}  // namespace

bool StepPlan::sound() const noexcept {
    const auto operators = static_cast<std::int64_t>(route.stops.size());
    const std::int64_t restores = route.n_restores();
    const std::int64_t moves = restores + static_cast<std::int64_t>(route.copies.size());
    const auto is_move = [&](std::int64_t move) { return move < moves; };
    const auto is_number = [](std::int64_t number) { return number >= 0; };
    return !op_ids.empty() && starts.size() == op_ids.size() && numbers.size() == op_ids.size() &&
           operators > 0 && restores >= 0 && go_up(route.stops, route.moves.size()) &&
           go_up(route.restores, route.restored.size()) &&
           go_up(starts, static_cast<std::size_t>(operators - 1)) &&
           std::ranges::all_of(numbers, is_number) && std::ranges::all_of(route.moves, is_move) &&
           std::ranges::all_of(route.restored, is_number) &&
           std::ranges::all_of(route.kept, is_number);
}

std::int64_t op_id_of(const ParsedCall& parsed) {
    return parsed.signature->number() << 2 | part_in_graph(parsed);
}

// -- between steps --------------------------------------------------------------------------------

void Learner::add_plan(c10::intrusive_ptr<StepPlan> plan) {
    std::erase_if(plans_, [&](const auto& other) { return other->key == plan->key; });
    plans_.push_back(std::move(plan));
}

void Learner::retain_plans(std::span<const std::int64_t> keys) {
    std::vector<c10::intrusive_ptr<StepPlan>> known;
    for (const std::int64_t key : keys) {
        const auto is_meant = [&](const auto& plan) { return plan->key == key; };
        const auto found = std::ranges::find_if(plans_, is_meant);
        if (found != plans_.end()) {
            known.push_back(*found);
        }
    }
    plans_ = std::move(known);
}

void Learner::begin(bool record) {
    forget_step();
    begun_ = true;
    wanted_ = record;
}

StepOutcome Learner::end() {
    StepOutcome ended = std::exchange(outcome_, StepOutcome());
    ended.complete = plan_ && matcher_.complete();
    ended.key = plan_ ? plan_->key : -1;
    ended.length = begun_ ? op_ids_.size() : 0;
    if (ended.length > 0) {
        ended.processor_ns = clock_.elapsed();
    }
    abandon_plan();
    end_recording();
    begun_ = false;
    return ended;
}

// Clear the state of the last step.
void Learner::forget_step() {
    op_ids_.clear();
    made_.clear();
    transcript_.reset();
    makes_.reset();
    outcome_.taken = too_long_ = false;
}

// -- during a step --------------------------------------------------------------------------------

bool Learner::asks(std::int64_t op_id) {
    const bool may_begin = begun_ && !too_long_ && !plan_ && !session_.room.stepping.is_set() &&
                           (op_id & GRAPH) != 0 && (op_id & BACKWARD) == 0;
    if (!may_begin || beginning_with(op_id) != nullptr) {
        return false;
    }
    if (asked_.size() >= MOST_ASKED) {
        asked_.clear();
    }
    return asked_.insert(op_id).second;
}

void Learner::observe(std::int64_t op_id, const ParsedCall& parsed) {
    makes_.reset();
    // Ignore operators of an optimizer step, and operators outside of `begin` and `end`.
    if (session_.room.stepping.is_set() || !begun_ || too_long_) {
        return;
    }
    if (op_ids_.empty()) {
        if ((op_id & GRAPH) == 0 || (op_id & BACKWARD) != 0) {
            return;  // the operator runs between two steps
        }
        clock_.start();
        if (wanted_) {
            begin_recording();
        }
    } else if (op_ids_.size() >= longest) {
        abandon_plan();
        end_recording();
        forget_step();
        too_long_ = true;
        return;
    }
    op_ids_.push_back(op_id);
    made_.push_back(session_.registry.records.storages_made);
    if (transcript_) {
        const std::size_t place = session_.engine.journal.written() - transcript_->first_entry;
        transcript_->places.push_back(static_cast<std::int64_t>(place));
    }
    if (!plan_) {
        if ((op_id & GRAPH) != 0) {
            may_begin(op_id);
        }
        return;
    }
    const std::int64_t place = matcher_.observe(op_id);
    if (place >= 0) {
        go_to(static_cast<std::size_t>(place));
    } else if (place == MISMATCH) {
        leave(parsed.facts.name.c_str());
    }
}

void Learner::made(const Recipe& call) {
    if (makes_ && following_ && call.replayable) {
        for (Value* value : call.outputs()) {
            following_->follower.made(*makes_ + value->storage->id, *value->storage);
        }
    }
}

void Learner::about_to_access(const StorageRecord& record) {
    if (following_) {
        const std::size_t at = matcher_.at();
        const bool goes_on = at < plan_->starts.size();
        const auto last = static_cast<std::int64_t>(plan_->route.stops.size()) - 1;
        const std::int64_t op = goes_on ? plan_->starts[at] : last;
        attempt([&] { following_->follower.about_to_access(record, op); });
    }
}

// Perform the plan's actions before the operator at index `place` of the plan, which is about to
// run.
void Learner::go_to(std::size_t place) {
    const std::int64_t op = plan_->starts[place];
    const std::int64_t number = plan_->numbers[place];
    if (following_ &&
        following_->follower.position() < plan_->route.stops[static_cast<std::size_t>(op)]) {
        attempt([&] { following_->follower.before(op); });
    }
    if (plan_) {
        makes_ = number - session_.registry.records.storages_made;
    }
}

// Perform `moves`, evictions and recomputations of the plan. After an error, the step only stops
// following the plan. If the program itself needs the value, it gets its own error later.
template <class F>
void Learner::attempt(F&& moves) {
    // Keep the plan alive, because another thread may stop following it during a recomputation.
    const c10::intrusive_ptr<Following> kept = following_;
    try {
        session_.observers.lost.add([&] { session_.room.bring(moves); });
    } catch (const std::exception& error) {
        outcome_.reason = StepOutcome::Reason::failed;
        if (ends_the_program(error)) {
            without_throwing([&] { abandon_plan(); });
            throw;
        }
        abandon_plan();
    }
}

// Handle a step that deviates from its plan at the operator `name`. Follow another plan that fits
// the operators of the step so far, or none.
void Learner::leave(const char* name) {
    for (const auto& other : plans_) {
        if (other != plan_) {
            const auto found = places(other->op_ids, op_ids_);
            if (found && found->back() >= 0) {
                take(other, *found);
                return;
            }
        }
    }
    outcome_.reason =
        matcher_.complete() ? StepOutcome::Reason::went_on : StepOutcome::Reason::another;
    outcome_.number = op_ids_.size() - 1;
    outcome_.name = name;
    abandon_plan();
    may_begin(op_ids_.back());
}

// Return a plan whose first operator is `op_id`, or null.
const c10::intrusive_ptr<StepPlan>* Learner::beginning_with(std::int64_t op_id) const {
    for (const auto& plan : plans_) {
        if (plan->op_ids.front() == op_id) {
            return &plan;
        }
    }
    return nullptr;
}

// Follow a plan that begins with operator `op_id`, if there is one.
void Learner::may_begin(std::int64_t op_id) {
    if (const auto* plan = beginning_with(op_id)) {
        std::vector<std::int64_t> found(op_ids_.size(), UNMATCHED);
        found.back() = 0;
        take(*plan, found);
    }
}

// Stop following the current plan, if any.
void Learner::abandon_plan() {
    makes_.reset();
    if (!following_) {
        return;
    }
    plan_.reset();
    session_.events.perform([&] { following_->follower.end(); });
    following_.reset();
}

// Follow `plan` from the current operator on. `found`: for each operator of the step so far, its
// index in the plan.
void Learner::take(c10::intrusive_ptr<StepPlan> plan, std::span<const std::int64_t> found) {
    abandon_plan();
    session_.frees.process_pending();  // frees values that only the previous plan kept in memory
    outcome_.taken = true;
    const std::vector<std::int64_t>& numbers = plan->numbers;
    const auto here = static_cast<std::size_t>(found.back());
    plan_ = std::move(plan);
    matcher_ = SequenceMatcher(plan_->op_ids, here + 1);
    following_ = c10::make_intrusive<Following>(session_.engine, plan_, *this);
    Storage* each = session_.engine.first_storage();
    for (; each != nullptr; each = each->next) {
        if (each->id >= made_.front() && each->replayable) {
            const auto after = std::ranges::upper_bound(made_, each->id);
            const auto run = static_cast<std::size_t>(after - made_.begin()) - 1;
            if (found[run] >= 0) {
                const auto place = static_cast<std::size_t>(found[run]);
                following_->follower.made(numbers[place] + each->id - made_[run], *each);
            }
        }
    }
    const std::int64_t makes = numbers[here] - session_.registry.records.storages_made;
    attempt([&] { following_->follower.skip(plan_->starts[here]); });
    if (plan_) {
        makes_ = makes;
    }
}

// -- recording ------------------------------------------------------------------------------------

// Start to record the step that begins now.
void Learner::begin_recording() {
    start_recording(session_, transcript_.emplace());
    recording_ = true;
}

// End the recording, and drop it if the journal ran out of memory.
void Learner::end_recording() {
    if (std::exchange(recording_, false) && transcript_) {
        if (!session_.observers.transcriber.notify(*transcript_)) {
            transcript_.reset();
        }
        session_.observers.transcriber.end();
    }
}

}  // namespace rekindle
