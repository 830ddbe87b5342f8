// Follows learned plans. A learned plan is made from the recording of an earlier training step. It
// says at which operator of later steps to evict or recompute which values.
//
// A step begins with the first operator after an optimizer step that is part of an autograd graph,
// and ends at the next optimizer step. The running step may be recorded. When a later step runs the
// same operators of the autograd graph in the same order as a recorded step, Python makes a plan
// for such steps in the background (rekindle.pytorch.learned), and passes it to `add_plan`.
//
// A step that begins with the first operator of a plan follows the plan (a `Route`), operator by
// operator. When the step ends or runs other operators, the eviction policy alone decides again. A
// plan affects only how long a step takes, never its results.
//
// The code here runs during a step; rekindle.pytorch.learned runs between steps.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../base/clock.h"
#include "../engine/follower.h"
#include "../memory/observers/transcript.h"
#include "../memory/session.h"
#include "../ops/parsed_call.h"
#include "sequence_matcher.h"

namespace rekindle {

// A learned plan for steps that run one sequence of operators. Operators and storages appear as
// numbers only, so the plan keeps no tensor alive.
struct StepPlan final : c10::intrusive_ptr_target {
    std::int64_t key = -1;             // number by which Python refers to the plan
    std::vector<std::int64_t> op_ids;  // numbers of the step's operators (`op_id_of`), in order
    // For each operator of the step, the number of operator calls that precede it in the trace.
    std::vector<std::int64_t> starts;
    // For each operator of the step, the number of storages made before it in the trace. This is
    // also the trace's number of the first storage that the operator makes.
    std::vector<std::int64_t> numbers;
    Route route;

    // Return true if all numbers of the plan are within their ranges.
    bool sound() const noexcept;
};

// State of a step that follows a plan. It keeps the plan alive.
struct Following final : c10::intrusive_ptr_target {
    Following(Engine& engine, c10::intrusive_ptr<StepPlan> of, Host& host)
        : plan(std::move(of)), follower(engine, plan->route, host) {}

    const c10::intrusive_ptr<StepPlan> plan;
    Follower follower;
};

// Outcome of a finished step: how far it followed a plan, and why it stopped following the plan.
struct StepOutcome final {
    enum class Reason : std::int8_t { none, went_on, another, failed };

    // Key of the plan that was followed to the end of the step; negative if there is none.
    std::int64_t key = -1;
    bool complete = false;  // all operators of the plan that are part of the autograd graph ran
    bool taken = false;     // the step followed a plan at least in part
    std::size_t length = 0;
    // Processor time of the thread that ran the step, from its first operator on; negative if
    // another thread ended it.
    Nanoseconds processor_ns = -1;
    // Why the step stopped following its last plan. `went_on`: the step had more operators.
    // `another`: the step had other operators. `failed`: an action of the plan raised an error.
    Reason reason = Reason::none;
    // index of the operator at which the step stopped following its plan
    std::size_t number = 0;
    const char* name = "";
};

// Return a number for an operator call. It depends on the signature of the call, and on whether the
// call is part of an autograd graph and of a backward pass. It is the same in every process.
std::int64_t op_id_of(const ParsedCall& parsed);

// Records the program's steps and follows plans, for one session, which owns this object. Every
// member function needs the session mutex.
class Learner final : public Host, public StepObserver {
public:
    explicit Learner(Session& session) : session_(session) {}

    Learner(const Learner&) = delete;
    Learner& operator=(const Learner&) = delete;
    ~Learner() override = default;

    // Most operators of a step that may follow a plan. There is a limit, because a program without
    // an optimizer never ends its step.
    std::size_t longest = std::size_t{1} << 20;

    std::size_t remembered() const noexcept { return op_ids_.size(); }

    // Return true between the calls of `begin` and `end`, when a step may run.
    bool watches() const noexcept { return begun_; }

    // -- between steps --------------------------------------------------------------------------

    // Add a plan that may be followed from now on. It replaces a plan with the same key.
    void add_plan(c10::intrusive_ptr<StepPlan> plan);

    // Keep only the plans with these keys. The keys are sorted by last use, the latest first.
    void retain_plans(std::span<const std::int64_t> keys);
    // Let a step begin at the next operator of an autograd graph. If `record` is true, record this
    // step.
    void begin(bool record);
    // End the step, and return its outcome. No step begins until `begin` is called.
    StepOutcome end();

    // Return the numbers of the operators of the last step.
    std::span<const std::int64_t> op_ids() const noexcept { return op_ids_; }

    // Return the recording of the last step, if it was recorded.
    const std::optional<Transcript>& transcript() const noexcept { return transcript_; }

    // -- during a step --------------------------------------------------------------------------

    // Return true if Python should be asked for stored plans of steps that begin with operator
    // `op_id`. Returns true once for each `op_id`.
    bool asks(std::int64_t op_id);
    // Record that the program is about to run the operator with number `op_id`.
    void observe(std::int64_t op_id, const ParsedCall& parsed);
    // Tell the followed plan which storages the operator call `call` of the program made.
    void made(const Recipe& call) override;
    // Record that the program is about to access an evicted value, because the plan may be late.
    void about_to_access(const StorageRecord& record) override;

    void poll() override { session_.frees.poll(); }

    Storage& current(Storage& storage) override { return rekindle::current(record_of(storage)); }

    void own(Storage& storage) override { record_of(storage).own(); }

    void disown(Storage& storage) override { session_.frees.disown(record_of(storage)); }

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

    Session& session_;
    std::vector<c10::intrusive_ptr<StepPlan>> plans_;
    std::unordered_set<std::int64_t> asked_;
    StepOutcome outcome_;

    // State of the running step.
    bool begun_ = false;                // a step may begin, or runs (see `begin`)
    bool wanted_ = false;               // the next step is to be recorded
    bool too_long_ = false;             // the step had more than `longest` operators
    std::vector<std::int64_t> op_ids_;  // numbers of the operators of the step so far
    ThreadClock clock_;                 // started before the first operator
    // For each operator of the step, the number of storages that the program had made before it.
    std::vector<std::int64_t> made_;
    std::optional<Transcript> transcript_;
    bool recording_ = false;  // `transcript_` is being recorded

    // State of the plan that the step follows.
    c10::intrusive_ptr<StepPlan> plan_;  // the plan; null: the step follows none
    c10::intrusive_ptr<Following> following_;
    SequenceMatcher matcher_;
    // Storages that the current operator makes: their number in the plan minus their id in the
    // engine. None if the plan does not have this operator.
    std::optional<std::int64_t> makes_;
};

// Return the learner of `session`; null if the session does not use learned plans.
inline Learner* learner_of(const Session& session) noexcept {
    return static_cast<Learner*>(session.steps.get());
}

}  // namespace rekindle
