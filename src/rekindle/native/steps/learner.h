// Follows learned plans: from the second step on, the future of a step is known.
//
// A step begins with the first operator of the autograd graph after an optimizer step, and ends at
// the next optimizer step. It is recorded while it runs. When a step of the same shape comes again,
// Python plans it in the background (rekindle.pytorch.learned), and passes the plan to `add_plan`.
//
// A step that begins like a planned one follows the plan (a `Route`), operator by operator. When
// the step ends or deviates, the online policy decides alone again. A plan is advice: it affects
// time only, never results.
//
// This file acts during steps; rekindle.pytorch.learned acts between them.
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

// A learned plan for one shape of a step. It has numbers only, no tensors.
struct StepPlan final : c10::intrusive_ptr_target {
    std::int64_t key = -1;          // key that Python gave it
    std::vector<std::int64_t> met;  // numbers of the operators of the step
    // For each operator, the number of calls in the trace before it.
    std::vector<std::int64_t> starts;
    // For each operator, the number of storages before it. The storages that it makes follow.
    std::vector<std::int64_t> numbers;
    Route route;

    // Return true if all numbers are within their ranges.
    bool sound() const noexcept;
};

// One execution of a plan, which it keeps alive.
struct Following final : c10::intrusive_ptr_target {
    Following(Engine& engine, c10::intrusive_ptr<StepPlan> of, Host& host)
        : plan(std::move(of)), follower(engine, plan->route, host) {}

    const c10::intrusive_ptr<StepPlan> plan;
    Follower follower;
};

// The outcome of a step.
struct StepOutcome final {
    enum class Reason : std::int8_t { none, went_on, another, failed };

    // Key of the plan that was followed to the end; negative: none.
    std::int64_t key = -1;
    bool complete = false;  // no operator of the graph was missing
    bool taken = false;     // some plan was followed for a part of the step
    std::size_t length = 0;
    // Why the last plan was abandoned since the previous call of `end`.
    Reason reason = Reason::none;
    std::size_t number = 0;  // index of the operator at which it was abandoned
    const char* name = "";
};

// Return a number for one operator of a step. It is the same in every process.
std::int64_t op_id_of(const ParsedCall& parsed);

// Follows the steps of the program of one driver, which owns it. Every member needs the core's
// lock.
class Learner final : public Host, public StepObserver {
public:
    explicit Learner(Driver& driver) : driver_(driver) {}

    Learner(const Learner&) = delete;
    Learner& operator=(const Learner&) = delete;
    Learner(Learner&&) = delete;
    Learner& operator=(Learner&&) = delete;
    ~Learner() override = default;

    // Longest step that is followed. A program without an optimizer never ends its step.
    std::size_t longest = std::size_t{1} << 20;

    std::size_t remembered() const noexcept { return met_.size(); }

    // Return true while a step may be running.
    bool watches() const noexcept { return begun_; }

    // -- between steps --------------------------------------------------------------------------

    // Add a plan that may be followed from now on, or replace the one with its key.
    void add_plan(c10::intrusive_ptr<StepPlan> plan);

    // Keep the plans with these keys, the most recently used first, and forget the others.
    void know(std::span<const std::int64_t> keys);
    // Allow a step to begin; `write_down`: record it.
    void begin(bool write_down);
    // End the step. None begins until `begin`. Return its outcome.
    StepOutcome end();

    // Return the numbers of the operators of the last step.
    std::span<const std::int64_t> met() const noexcept { return met_; }

    // Return the recording of the last step, if it was recorded.
    const std::optional<Transcript>& transcript() const noexcept { return transcript_; }

    // -- during a step --------------------------------------------------------------------------

    // Return true if Python should be asked for plans of steps that begin with `met`: once for
    // each.
    bool asks(std::int64_t met);
    // Note that the program is about to run the operator with number `met`.
    void meets(std::int64_t met, const ParsedCall& parsed);
    // Note that the program ran an operator, or that a source was registered.
    void made(const Recipe& call) override;
    // Note that the program is about to access `record`, which is evicted.
    void wanting(const StorageRecord& record) override;

    void poll() override { driver_.poll(); }

    Storage& current(Storage& storage) override { return rekindle::current(record_of(storage)); }

    void own(Storage& storage) override { driver_.own(record_of(storage)); }

    void disown(Storage& storage) override { driver_.disown(record_of(storage)); }

private:
    void write_down();
    void go_to(std::size_t place);
    void leave(const char* name);
    void may_begin(std::int64_t met);
    void take(c10::intrusive_ptr<StepPlan> plan, std::span<const std::int64_t> found);
    void let_go();
    void stop_writing();
    void forget_step();
    const c10::intrusive_ptr<StepPlan>* beginning_with(std::int64_t met) const;
    template <class F>
    void attempt(F&& moves);

    Driver& driver_;
    std::vector<c10::intrusive_ptr<StepPlan>> plans_;
    std::unordered_set<std::int64_t> asked_;
    StepOutcome outcome_;

    // State of the step that runs.
    bool begun_ = false;  // a step may begin, or runs
    bool wanted_ = false;
    bool taken_ = false;  // a plan was followed for a part of the step
    bool too_long_ = false;
    std::vector<std::int64_t> met_;
    std::vector<std::int64_t> made_;  // number of storages in the whole run before each operator
    std::optional<Transcript> transcript_;
    bool writing_ = false;  // the recording continues

    // State of the plan that is followed.
    c10::intrusive_ptr<StepPlan> plan_;  // null: none
    c10::intrusive_ptr<Following> following_;
    SequenceMatcher matcher_;
    // Storage numbers of the plan minus those of the run, for the current operator.
    std::optional<std::int64_t> makes_;
};

// Return the learner of `driver`; null: its steps are not followed.
inline Learner* learner_of(const Driver& driver) noexcept {
    return static_cast<Learner*>(driver.steps.get());
}

}  // namespace rekindle
