// Follows learned plans. A learned plan is made from the recording of an earlier training step, and
// says which values to evict and to recompute at which operator of the next steps.
//
// A step begins with the first operator after an optimizer step that is part of an autograd graph,
// and ends at the next optimizer step. The running step is recorded. When a step with the same
// sequence of operators (its shape) comes again, Python makes a plan for that shape in the
// background (rekindle.pytorch.learned), and passes the plan to `add_plan`.
//
// A step that begins like a plan's shape follows the plan (a `Route`), operator by operator. When
// the step ends or deviates from the shape, the online policy alone decides again. A plan affects
// only how long a step takes, never its results.
//
// This file works during a step; rekindle.pytorch.learned works between steps.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../engine/follower.h"
#include "../memory/driver.h"
#include "../memory/transcript.h"
#include "../ops/parsed_call.h"
#include "sequence_matcher.h"

namespace rekindle {

// A learned plan for one shape of a step. Operators and storages appear as numbers only, so the
// plan keeps no tensor alive.
struct StepPlan final : c10::intrusive_ptr_target {
    std::int64_t key = -1;             // key by which Python refers to the plan
    std::vector<std::int64_t> op_ids;  // numbers of the step's operators (`op_id_of`), in order
    // For each operator, the number of calls that precede it in the trace.
    std::vector<std::int64_t> starts;
    // For each operator, the number of storages made before it in the trace. It is also the trace's
    // number of the first storage that the operator makes.
    std::vector<std::int64_t> numbers;
    Route route;

    // Return true if all numbers of the plan are within their ranges.
    bool sound() const noexcept;
};

// One step that follows a plan, which this object keeps alive.
struct Following final : c10::intrusive_ptr_target {
    Following(Engine& engine, c10::intrusive_ptr<StepPlan> of, Host& host)
        : plan(std::move(of)), follower(engine, plan->route, host) {}

    const c10::intrusive_ptr<StepPlan> plan;
    Follower follower;
};

// Outcome of a step that could follow a plan: how far it did, and why it left the plan.
struct StepOutcome final {
    enum class Reason : std::int8_t { none, went_on, another, failed };

    // Key of the plan that was followed to the end of the step; negative if there is none.
    std::int64_t key = -1;
    bool complete = false;  // every graph operator of the plan's shape ran
    bool taken = false;     // a plan was followed for at least a part of the step
    std::size_t length = 0;
    // Why the last plan was abandoned: the step had more operators (`went_on`), had other operators
    // (`another`), or an action of the plan raised (`failed`).
    Reason reason = Reason::none;
    std::size_t number = 0;  // index in the step of the operator at which the plan was abandoned
    const char* name = "";
};

// Return a number that identifies the operator call `parsed` by its signature and its part in the
// autograd graph. The number is the same in every process.
std::int64_t op_id_of(const ParsedCall& parsed);

// Follows the program's steps for one driver, which owns this object. Every member needs the
// session mutex.
class Learner final : public Host, public StepObserver {
public:
    explicit Learner(Driver& driver) : driver_(driver) {}

    Learner(const Learner&) = delete;
    Learner& operator=(const Learner&) = delete;
    Learner(Learner&&) = delete;
    Learner& operator=(Learner&&) = delete;
    ~Learner() override = default;

    // Largest number of operators of a step that may follow a plan. A program without an optimizer
    // never ends its step.
    std::size_t longest = std::size_t{1} << 20;

    std::size_t remembered() const noexcept { return op_ids_.size(); }

    // Return true between the calls of `begin` and `end`.
    bool watches() const noexcept { return begun_; }

    // -- between steps --------------------------------------------------------------------------

    // Add a plan that may be followed from now on. It replaces a plan with the same key.
    void add_plan(c10::intrusive_ptr<StepPlan> plan);

    // Keep only the plans with the keys `keys`, which are sorted by last use, the latest first.
    void retain_plans(std::span<const std::int64_t> keys);
    // Allow a step to begin at the next operator of an autograd graph. If `record`, record the
    // step.
    void begin(bool record);
    // End the step, and return its outcome. No step begins until `begin` is called.
    StepOutcome end();

    // Return the numbers of the operators of the last step.
    std::span<const std::int64_t> op_ids() const noexcept { return op_ids_; }

    // Return the recording of the last step, if it was recorded.
    const std::optional<Transcript>& transcript() const noexcept { return transcript_; }

    // -- during a step --------------------------------------------------------------------------

    // Return true if Python should be asked for plans of steps that begin with operator `op_id`.
    // Returns true once for each `op_id`.
    bool asks(std::int64_t op_id);
    // Record that the program is about to run the operator with number `op_id`.
    void observe(std::int64_t op_id, const ParsedCall& parsed);
    // Record that the program ran `call`, or that a storage without a recipe was registered (a call
    // without an operator).
    void made(const Recipe& call) override;
    // Remember that the program is about to access `record`, which is evicted. The plan may be
    // late.
    void about_to_access(const StorageRecord& record) override;

    void poll() override { driver_.poll(); }

    Storage& current(Storage& storage) override { return rekindle::current(record_of(storage)); }

    void own(Storage& storage) override { driver_.own(record_of(storage)); }

    void disown(Storage& storage) override { driver_.disown(record_of(storage)); }

private:
    void begin_recording();
    void go_to(std::size_t place);
    void leave(const char* name);
    void may_begin(std::int64_t op_id);
    void take(c10::intrusive_ptr<StepPlan> plan, std::span<const std::int64_t> found);
    void abandon_plan();
    void end_recording();
    void forget_step();
    const c10::intrusive_ptr<StepPlan>* beginning_with(std::int64_t op_id) const;
    template <class F>
    void attempt(F&& moves);

    Driver& driver_;
    std::vector<c10::intrusive_ptr<StepPlan>> plans_;
    std::unordered_set<std::int64_t> asked_;
    StepOutcome outcome_;

    // State of the step that runs.
    bool begun_ = false;                // `begin` was called: a step may begin, or runs
    bool wanted_ = false;               // the step is to be recorded from its first operator on
    bool taken_ = false;                // a plan was followed for a part of the step
    bool too_long_ = false;             // the step had more than `longest` operators
    std::vector<std::int64_t> op_ids_;  // numbers of the operators of the step so far
    // For each operator of the step, the number of storages that the run had made before it.
    std::vector<std::int64_t> made_;
    std::optional<Transcript> transcript_;
    bool recording_ = false;  // `transcript_` is being recorded

    // State of the plan that is followed.
    c10::intrusive_ptr<StepPlan> plan_;  // plan that the step follows; null: none
    c10::intrusive_ptr<Following> following_;
    SequenceMatcher matcher_;
    // What to add to the id of a storage that the current operator makes to get its number in the
    // plan.
    std::optional<std::int64_t> makes_;
};

// Return the learner of `driver`; null: its steps are not followed.
inline Learner* learner_of(const Driver& driver) noexcept {
    return static_cast<Learner*>(driver.steps.get());
}

}  // namespace rekindle
