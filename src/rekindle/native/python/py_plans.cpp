#include "py_plans.h"

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "../base/mutex.h"
#include "../memory/program.h"
#include "../steps/learner.h"
#include "conversions.h"
#include "py_transcripts.h"

namespace rekindle {

namespace {

// Return the learner of a driver. Raise if the driver follows no learned plans.
Learner& learner_of(PyObject* capsule) {
    const Driver& driver = driver_of(capsule);
    Learner* learner = learner_of(driver);
    TORCH_CHECK(learner != nullptr, "this driver was made to learn nothing");
    return *learner;
}

// Return the name of `reason` for Python.
const char* said(StepOutcome::Reason reason) noexcept {
    switch (reason) {
        case StepOutcome::Reason::went_on:
            return "went on";
        case StepOutcome::Reason::another:
            return "another";
        case StepOutcome::Reason::failed:
            return "failed";
        default:
            return "";
    }
}

}  // namespace

// teach(driver, key, met, starts, numbers, (stops, moves, restores, restored, kept)) -> bool
//
// Add a learned plan; see `StepPlan` in steps/learner.h and `Route` in engine/follower.h. All
// arguments after `key` are lists of integers. Return False if they are inconsistent.
PyObject* add_plan(PyObject* arguments) {
    PyObject* capsule = nullptr;
    PyObject* met = nullptr;
    PyObject* starts = nullptr;
    PyObject* numbers = nullptr;
    PyObject* stops = nullptr;
    PyObject* moves = nullptr;
    PyObject* restores = nullptr;
    PyObject* restored = nullptr;
    PyObject* kept = nullptr;
    long long key = 0;
    parse(
        arguments,
        "OLOOO(OOOOO)",
        &capsule,
        &key,
        &met,
        &starts,
        &numbers,
        &stops,
        &moves,
        &restores,
        &restored,
        &kept
    );
    auto plan = c10::make_intrusive<StepPlan>();
    plan->key = key;
    plan->met = numbers_in(met);
    plan->starts = numbers_in(starts);
    plan->numbers = numbers_in(numbers);
    plan->route = {
        numbers_in(stops),
        numbers_in(moves),
        numbers_in(restores),
        numbers_in(restored),
        numbers_in(kept),
    };
    const bool sound = plan->sound();
    if (sound) {
        Learner& learner = learner_of(capsule);
        const Locked lock;
        learner.add_plan(std::move(plan));
    }
    return PyBool_FromLong(sound ? 1 : 0);
}

// know(driver, keys) -> None
//
// Keep only the plans with the keys `keys`, which are sorted by last use, the latest first.
PyObject* know(PyObject* arguments) {
    PyObject* capsule = nullptr;
    PyObject* keys = nullptr;
    parse(arguments, "OO", &capsule, &keys);
    const std::vector<std::int64_t> known = numbers_in(keys);
    Learner& learner = learner_of(capsule);
    const Locked lock;
    learner.know(known);
    return nothing();
}

// begin_step(driver, write_down) -> None
//
// Allow a step to begin at the next operator of an autograd graph. If `write_down`, record the
// step.
PyObject* begin_step(PyObject* arguments) {
    PyObject* capsule = nullptr;
    int write_down = 0;
    parse(arguments, "Op", &capsule, &write_down);
    Learner& learner = learner_of(capsule);
    const Locked lock;
    learner.begin(write_down != 0);
    return nothing();
}

// end_step(driver) -> (key, complete, taken, length, reason, number, name)
//
// End the step. `key`: key of the plan that the step followed to the end, or -1. `complete`: all
// graph operators of this plan ran. `taken`: the step followed some plan for at least a part.
// `length`: number of operators of the step. `reason`: why the last plan was abandoned ("", "went
// on", "another" or "failed"), at the operator with index `number` and name `name`. See
// `StepOutcome` in steps/learner.h.
PyObject* end_step(PyObject* arguments) {
    PyObject* capsule = nullptr;
    parse(arguments, "O", &capsule);
    Driver& driver = driver_of(capsule);
    Learner& learner = learner_of(capsule);
    const StepOutcome ended = translate_errors(driver, [&] {
        const Locked lock;
        driver.process_pending();
        return learner.end();
    });
    return Py_BuildValue(
        "LNNnsns",
        static_cast<long long>(ended.key),
        PyBool_FromLong(ended.complete ? 1 : 0),
        PyBool_FromLong(ended.taken ? 1 : 0),
        static_cast<Py_ssize_t>(ended.length),
        said(ended.reason),
        static_cast<Py_ssize_t>(ended.number),
        ended.name
    );
}

// met_in_step(driver) -> bytes
//
// Return the numbers of the operators of the last step.
PyObject* met_in_step(PyObject* arguments) {
    PyObject* capsule = nullptr;
    parse(arguments, "O", &capsule);
    const Learner& learner = learner_of(capsule);
    std::vector<std::int64_t> met;
    {
        const Locked lock;
        met.assign(learner.met().begin(), learner.met().end());
    }
    return bytes_of(std::span<const std::int64_t>(met));
}

// written_in_step(driver) -> tuple | None
//
// Return the recording of the last step as `written_down` does. None: it was not recorded.
PyObject* written_in_step(PyObject* arguments) {
    PyObject* capsule = nullptr;
    parse(arguments, "O", &capsule);
    const Learner& learner = learner_of(capsule);
    std::optional<Transcript> copy;
    {
        const Locked lock;
        copy = learner.transcript();
    }
    return copy ? words_of(*copy) : nothing();
}

}  // namespace rekindle
