// Learned schedules: from the second step on, the future is known.
//
// A step begins with the first operator of the graph after an optimizer's step, and ends with the
// next one; what comes in between belongs to none. It is written down while it runs within the
// budget, and when its like was met again, planned in the background. A step that begins like a
// planned one then follows the route, operator by operator, until it ends or does otherwise; then
// the online policy decides alone again. A route is advice: nothing but time depends on it.
//
// What happens during a step is here, what happens between two of them in rekindle.pytorch.learned.
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
#include "../ops/invocation.h"
#include "walk.h"

namespace rekindle {

// One shape of a step that has a route: numbers, no tensors.
struct Lesson final : c10::intrusive_ptr_target {
    std::int64_t key = -1;              // what Python calls it
    std::vector<std::int64_t> met;      // its operators
    std::vector<std::int64_t> starts;   // how many operators the trace has before each of them
    std::vector<std::int64_t> numbers;  // how many storages: those that it makes follow
    Route route;

    // Whether all that is numbered is there.
    bool sound() const noexcept;
};

// One run along the route of a lesson, which lives as long.
struct Following final : c10::intrusive_ptr_target {
    Following(Engine& engine, c10::intrusive_ptr<Lesson> of, Host& host)
        : lesson(std::move(of)), follower(engine, lesson->route, host) {}

    const c10::intrusive_ptr<Lesson> lesson;
    Follower follower;
};

// How a step ended.
struct Ended final {
    enum class Reason : std::int8_t { none, went_on, another, failed };

    std::int64_t key = -1;  // of the lesson that was followed at the end; negative: none
    bool complete = false;  // nothing of it was missing
    bool taken = false;     // some lesson was followed for a part of the step
    std::size_t length = 0;
    // Why the last lesson was left, since this was asked last.
    Reason reason = Reason::none;
    std::size_t number = 0;  // of the operator with which that was
    const char* name = "";
};

// One operator of a step as a number, which tells it from others in every process.
std::int64_t met_by(const Invocation& invocation);

// Follows the steps of one driver, which has it. Like that it needs the core's lock.
class Learner final : public Host, public StepObserver {
public:
    explicit Learner(Driver& driver) : driver_(driver) {}

    Learner(const Learner&) = delete;
    Learner& operator=(const Learner&) = delete;
    Learner(Learner&&) = delete;
    Learner& operator=(Learner&&) = delete;
    ~Learner() override = default;

    // Operators of a step that are remembered: a program without an optimizer never ends its.
    std::size_t longest = std::size_t{1} << 20;

    std::size_t remembered() const noexcept { return met_.size(); }

    // Whether the step that runs is of interest.
    bool watches() const noexcept { return begun_; }

    // -- between steps --------------------------------------------------------------------------

    // A lesson that may be followed from now on, in the place of one that has its key.
    void teach(c10::intrusive_ptr<Lesson> lesson);

    // Which of them are known, the one met last first. Others are forgotten.
    void know(std::span<const std::int64_t> keys);
    // A step may begin; `write_down`: if it does, it is written down.
    void begin(bool write_down);
    // The step is over, and none begins until `begin`.
    Ended end();

    // The operators of the step that is over.
    std::span<const std::int64_t> met() const noexcept { return met_; }

    // As it was written down, if it was.
    const std::optional<Transcript>& transcript() const noexcept { return transcript_; }

    // -- during a step --------------------------------------------------------------------------

    // Whether somebody should be asked what steps begin with this: once for each.
    bool asks(std::int64_t met);
    // The program is about to run an operator.
    void meets(std::int64_t met, const Invocation& invocation);
    // It ran one, or showed something that it had already.
    void made(const Recipe& call) override;
    // It asks for `record`, which is gone.
    void wanting(const Record& record) override;

    void poll() override { driver_.poll(); }

    Storage& current(Storage& storage) override { return rekindle::current(record_of(storage)); }

    void own(Storage& storage) override { driver_.own(record_of(storage)); }

    void disown(Storage& storage) override { driver_.disown(record_of(storage)); }

private:
    void write_down();
    void go_to(std::size_t place);
    void leave(const char* name);
    void may_begin(std::int64_t met);
    void take(c10::intrusive_ptr<Lesson> lesson, std::span<const std::int64_t> found);
    void let_go();
    void stop_writing();
    void forget_step();
    const c10::intrusive_ptr<Lesson>* beginning_with(std::int64_t met) const;
    template <class F>
    void attempt(F&& moves);

    Driver& driver_;
    std::vector<c10::intrusive_ptr<Lesson>> lessons_;
    std::unordered_set<std::int64_t> asked_;
    Ended ended_;

    // Of the step that runs.
    bool begun_ = false;  // it may
    bool wanted_ = false;
    bool taken_ = false;  // a lesson was followed, for a part of it at least
    bool too_long_ = false;
    std::vector<std::int64_t> met_;
    std::vector<std::int64_t> made_;  // storages before each operator, in the whole run
    std::optional<Transcript> transcript_;
    bool writing_ = false;  // it is not over

    // Of the lesson that it follows.
    c10::intrusive_ptr<Lesson> lesson_;  // null: none
    c10::intrusive_ptr<Following> following_;
    Walk walk_;
    std::optional<std::int64_t>
        makes_;  // what numbers of the lesson have more than those of the run
};

// Of `driver`; null: nobody follows its program's steps.
inline Learner* learner_of(const Driver& driver) noexcept {
    return static_cast<Learner*>(driver.steps.get());
}

}  // namespace rekindle
