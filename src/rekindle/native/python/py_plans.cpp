#include "py_plans.h"

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "../base/mutex.h"
#include "../memory/notify.h"
#include "../steps/learner.h"
#include "conversions.h"
#include "py_transcripts.h"

namespace rekindle {

namespace {

// Return the learner of a session. Raise if the session follows no learned plans.
Learner& learner_of(PyObject* capsule) {
    const Session& session = session_of(capsule);
    Learner* learner = learner_of(session);
    TORCH_CHECK(learner != nullptr, "this session was made to learn nothing");
    return *learner;
}

// Return the text that `end_step` gives Python for `reason`.
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

// add_plan(driver, key, op_ids, starts, numbers,
//     (stops, moves, restores, restored, kept, copies)) -> bool
//
// Add a learned plan; see `StepPlan` in steps/learner.h and `Route` in engine/follower.h. All
// arguments after `key` are lists of integers. Return False if they are inconsistent.
PyObject* add_plan(PyObject* arguments) {
    PyObject* capsule = nullptr;
    PyObject* op_ids = nullptr;
    PyObject* starts = nullptr;
    PyObject* numbers = nullptr;
    PyObject* stops = nullptr;
    PyObject* moves = nullptr;
    PyObject* restores = nullptr;
    PyObject* restored = nullptr;
    PyObject* kept = nullptr;
    PyObject* copies = nullptr;
    long long key = 0;
    parse(
        arguments,
        "OLOOO(OOOOOO)",
        &capsule,
        &key,
        &op_ids,
        &starts,
        &numbers,
        &stops,
        &moves,
        &restores,
        &restored,
        &kept,
        &copies
    );
    auto plan = c10::make_intrusive<StepPlan>();
    plan->key = key;
    plan->op_ids = numbers_in(op_ids);
    plan->starts = numbers_in(starts);
    plan->numbers = numbers_in(numbers);
    plan->route = {
        numbers_in(stops),
        numbers_in(moves),
        numbers_in(restores),
        numbers_in(restored),
        numbers_in(kept),
        numbers_in(copies),
    };
    const bool sound = plan->sound();
    if (sound) {
        Learner& learner = learner_of(capsule);
        const Locked lock;
        learner.add_plan(std::move(plan));
    }
    return PyBool_FromLong(sound ? 1 : 0);
}

// retain_plans(driver, keys) -> None
//
// Keep only the plans with these keys. The keys are sorted by last use, the latest first.
PyObject* retain_plans(PyObject* arguments) {
    PyObject* capsule = nullptr;
    PyObject* keys = nullptr;
    parse(arguments, "OO", &capsule, &keys);
    const std::vector<std::int64_t> known = numbers_in(keys);
    Learner& learner = learner_of(capsule);
    const Locked lock;
    learner.retain_plans(known);
    return nothing();
}

// begin_step(driver, record) -> None
//
// Let a step begin at the next operator of an autograd graph. If `record` is True, record this
// step.
PyObject* begin_step(PyObject* arguments) {
    PyObject* capsule = nullptr;
    int record = 0;
    parse(arguments, "Op", &capsule, &record);
    Learner& learner = learner_of(capsule);
    const Locked lock;
    learner.begin(record != 0);
    return nothing();
}

// end_step(driver) -> (key, complete, taken, length, reason, number, name)
//
// End the running step. `key`: key of the plan that the step followed to the end, or -1.
// `complete`: all graph operators of this plan ran. `taken`: the step followed a plan at least in
// part. `length`: number of operators of the step. `reason`: why the step stopped following its
// plan ("", "went on", "another" or "failed"), at the operator with index `number` and name `name`.
// See `StepOutcome` in steps/learner.h.
PyObject* end_step(PyObject* arguments) {
    PyObject* capsule = nullptr;
    parse(arguments, "O", &capsule);
    Session& session = session_of(capsule);
    Learner& learner = learner_of(capsule);
    const StepOutcome ended = translate_errors(session, [&] {
        const Locked lock;
        session.frees.process_pending();
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

// op_ids_of_step(driver) -> bytes
//
// Return the numbers (`op_id_of`) of the operators of the last step, as an array of 64-bit words.
PyObject* op_ids_of_step(PyObject* arguments) {
    PyObject* capsule = nullptr;
    parse(arguments, "O", &capsule);
    const Learner& learner = learner_of(capsule);
    std::vector<std::int64_t> op_ids;
    {
        const Locked lock;
        op_ids.assign(learner.op_ids().begin(), learner.op_ids().end());
    }
    return bytes_of(std::span<const std::int64_t>(op_ids));
}

// recording_of_step(driver) -> tuple | None
//
// Return the recording of the last step as `recording` does, or None if the step was not recorded.
PyObject* recording_of_step(PyObject* arguments) {
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
