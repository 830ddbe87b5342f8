#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "../base/mutex.h"
#include "../memory/notify.h"
#include "../steps/learner.h"
#include "methods.h"

namespace rekindle {

namespace functions {

namespace {

// Return the learner of a session. Raise if the session follows no learned plans.
Learner& learner_in(const Session& session) {
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

// Add a learned plan; see `StepPlan` in steps/learner.h and `Route` in engine/follower.h. All
// arguments after `key` are lists of integers. Return False if they are inconsistent.
bool add_plan(
    const Session& session,
    std::int64_t key,
    PyObject* op_ids,
    PyObject* starts,
    PyObject* numbers,
    PyObject* route
) {
    PyObject* stops = nullptr;
    PyObject* moves = nullptr;
    PyObject* restores = nullptr;
    PyObject* restored = nullptr;
    PyObject* kept = nullptr;
    PyObject* copies = nullptr;
    parse(route, "OOOOOO", &stops, &moves, &restores, &restored, &kept, &copies);
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
        Learner& learner = learner_in(session);
        const Locked lock;
        learner.add_plan(std::move(plan));
    }
    return sound;
}

// Keep only the plans with these keys. The keys are sorted by last use, the latest first.
void retain_plans(const Session& session, PyObject* keys) {
    const std::vector<std::int64_t> known = numbers_in(keys);
    Learner& learner = learner_in(session);
    const Locked lock;
    learner.retain_plans(known);
}

// Let a step begin at the next operator of an autograd graph. If `record` is True, record this
// step.
void begin_step(const Session& session, bool record) {
    Learner& learner = learner_in(session);
    const Locked lock;
    learner.begin(record);
}

// End the running step. `key`: key of the plan that the step followed to the end, or -1.
// `complete`: all graph operators of this plan ran. `taken`: the step followed a plan at least in
// part. `length`: number of operators of the step. `processor_ns`: processor time of the step, or
// -1. `reason`: why the step stopped following its plan ("", "went on", "another" or "failed"), at
// the operator with index `number` and name `name`. See `StepOutcome` in steps/learner.h.
PyObject* end_step(Session& session) {
    Learner& learner = learner_in(session);
    StepOutcome ended;
    {
        const Locked lock;
        session.frees.process_pending();
        ended = learner.end();
    }
    return Py_BuildValue(
        "LNNnLsns",
        static_cast<long long>(ended.key),
        PyBool_FromLong(ended.complete ? 1 : 0),
        PyBool_FromLong(ended.taken ? 1 : 0),
        static_cast<Py_ssize_t>(ended.length),
        static_cast<long long>(ended.processor_ns),
        said(ended.reason),
        static_cast<Py_ssize_t>(ended.number),
        ended.name
    );
}

// Return true if `step`, the numbers of the operators of a finished step, has the shape `shape`.
bool step_has_shape(PyObject* shape, PyObject* step) {
    return has_shape(numbers_in(shape), numbers_in(step));
}

// Return the numbers (`op_id_of`) of the operators of the last step, as an array of 64-bit words.
PyObject* op_ids_of_step(const Session& session) {
    const Learner& learner = learner_in(session);
    std::vector<std::int64_t> op_ids;
    {
        const Locked lock;
        op_ids.assign(learner.op_ids().begin(), learner.op_ids().end());
    }
    return bytes_of(std::span<const std::int64_t>(op_ids));
}

// Return the recording of the last step as `recording` does, or None if the step was not recorded.
PyObject* recording_of_step(const Session& session) {
    const Learner& learner = learner_in(session);
    std::optional<Transcript> copy;
    {
        const Locked lock;
        copy = learner.transcript();
    }
    return copy ? words_of(*copy) : nothing();
}

}  // namespace

}  // namespace functions

PyMethodDef* plan_methods() {
    static std::array all{
        method<functions::add_plan>("add_plan"),
        method<functions::retain_plans>("retain_plans"),
        method<functions::begin_step>("begin_step"),
        method<functions::end_step>("end_step"),
        method<functions::step_has_shape>("step_has_shape"),
        method<functions::op_ids_of_step>("op_ids_of_step"),
        method<functions::recording_of_step>("recording_of_step"),
        PyMethodDef{},
    };
    return all.data();
}

}  // namespace rekindle
