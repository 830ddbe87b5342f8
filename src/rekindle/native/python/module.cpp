// The Python module `_torch`, by which Python calls the native core. This file lists all functions
// of the module and defines some of them. The other files in this folder define the rest. The
// Python code that calls these functions is in rekindle.pytorch.native.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../allocator/arena.h"
#include "../allocator/counting_allocator.h"
#include "../dispatch/in_place.h"
#include "../dispatch/proxy.h"
#include "../dispatch/runtime.h"
#include "../memory/evict_held_last.h"
#include "../memory/notify.h"
#include "../memory/room/own_policy.h"
#include "../memory/room/swapper.h"
#include "../memory/session.h"
#include "../steps/learner.h"
#include "../torch/dispatch_key.h"
#include "../torch/pyobjects.h"
#include "../torch/raised.h"
#include "conversions.h"
#include "for_tests.h"
#include "py_held_eviction.h"
#include "py_optimizer.h"
#include "py_plans.h"
#include "py_profilers.h"
#include "py_snapshot.h"
#include "py_stats.h"
#include "py_steps.h"
#include "py_storages.h"
#include "py_swap.h"
#include "py_transcripts.h"
#include "set_data.h"

namespace {

using rekindle::Events;
using rekindle::Locked;
using rekindle::must;
using rekindle::nothing;
using rekindle::Object;
using rekindle::Observers;
using rekindle::parse;
using rekindle::PythonChooser;
using rekindle::Room;
using rekindle::Session;
using rekindle::session_in;
using rekindle::session_of;

// -- functions of the module ----------------------------------------------------------------------

// Return the strings of a Python sequence.
std::vector<std::string> texts(PyObject* list) {
    const Object each(PySequence_Fast(list, "names: a list"));
    std::vector<std::string> found;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(each.get()); ++i) {
        const char* text = PyUnicode_AsUTF8(PySequence_Fast_GET_ITEM(each.get(), i));
        must(text != nullptr);
        found.emplace_back(text);
    }
    return found;
}

// Register the traits of operators: a list of (name, flags, three positions of batch statistics,
// and the position of an `accumulate` argument).
void learn_all_traits(PyObject* list) {
    const Object each(PySequence_Fast(list, "traits: a list"));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(each.get()); ++i) {
        const char* name = nullptr;
        rekindle::Traits made;
        auto& [mean, variance, training] = made.statistics;
        parse(
            PySequence_Fast_GET_ITEM(each.get(), i),
            "sIiiii",
            &name,
            &made.flags,
            &mean,
            &variance,
            &training,
            &made.accumulate
        );
        rekindle::learn_traits(name, made);
    }
}

// Register operators whose result may be written over their first argument: a list of (name,
// overload, twin overload that writes into a given tensor, autograd nodes).
void learn_all_in_place(PyObject* list) {
    const Object each(PySequence_Fast(list, "in place: a list"));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(each.get()); ++i) {
        const char* name = nullptr;
        const char* overload = nullptr;
        const char* twin = nullptr;
        PyObject* nodes = nullptr;
        parse(PySequence_Fast_GET_ITEM(each.get(), i), "sssO", &name, &overload, &twin, &nodes);
        rekindle::learn_in_place({name, overload, twin, texts(nodes)});
    }
}

// start(answers, tensor, parameter, traits, effects, own, products, may_use_workspace, in_place)
//     -> None
//
// Install the core in PyTorch, once per process. `answers`: the object that answers calls into
// Python. `tensor` and `parameter`: the classes `torch.Tensor` and `torch.nn.Parameter`. `traits`:
// see `learn_all_traits`. `effects`: namespaces of operators that are never recomputed, because
// they have external effects (R9, everything else runs once). `own`: the other namespaces of
// PyTorch's own operators, which are recomputed untried.
// `products` and `may_use_workspace`: parts of names of operators that sum products, and of
// operators that may use a workspace on a CPU. `in_place`: see `learn_all_in_place`.
PyObject* start(PyObject* arguments) {
    PyObject* answers = nullptr;
    PyObject* tensor = nullptr;
    PyObject* parameter = nullptr;
    PyObject* traits = nullptr;
    PyObject* effects = nullptr;
    PyObject* own = nullptr;
    PyObject* products = nullptr;
    PyObject* may_use_workspace = nullptr;
    PyObject* in_place = nullptr;
    parse(
        arguments,
        "OOOOOOOOO",
        &answers,
        &tensor,
        &parameter,
        &traits,
        &effects,
        &own,
        &products,
        &may_use_workspace,
        &in_place
    );
    learn_all_traits(traits);
    for (const std::string& effect : texts(effects)) {
        rekindle::learn_effects(effect);
    }
    for (const std::string& each : texts(own)) {
        rekindle::learn_own(each);
    }
    for (const std::string& part : texts(products)) {
        rekindle::learn_products(part);
    }
    for (const std::string& part : texts(may_use_workspace)) {
        rekindle::learn_workspace_operators(part);
    }
    learn_all_in_place(in_place);
    rekindle::init_callbacks(answers);
    rekindle::set_tensor_types(tensor, parameter);
    rekindle::register_fallback();
    rekindle::install_engine_proxy();
    rekindle::see_set_data(tensor);
    return nothing();
}

// learn_traits(name, flags) -> None
//
// Register the traits (flags) of one operator that is defined after `start`, such as a function of
// the program.
PyObject* learn_traits(PyObject* arguments) {
    const char* name = nullptr;
    rekindle::Traits made;
    parse(arguments, "si", &name, &made.flags);
    const Locked lock;
    rekindle::learn_traits(name, made);
    return nothing();
}

// backward_node() -> (str, int, bool, Tensor | None) | None
//
// Return the autograd node that runs on this thread: name, sequence number, whether its first input
// alone requires a gradient, and the parameter whose gradient it accumulates. None: no node runs.
//
// `torch._C._current_autograd_node` makes a Python object for the node. If all nodes of a long
// graph have one, PyTorch frees the graph by recursion, and the stack overflows.
PyObject* backward_node(PyObject* arguments) {
    parse(arguments, "");
    const auto node = torch::autograd::get_current_node();
    if (node == nullptr) {
        return nothing();
    }
    const auto* accumulates = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
    Object parameter(accumulates == nullptr ? nothing() : THPVariable_Wrap(accumulates->variable));
    return Py_BuildValue(
        "sLNN",
        node->name().c_str(),
        static_cast<long long>(node->sequence_nr()),
        PyBool_FromLong(rekindle::only_first_leads_on(*node) ? 1 : 0),
        parameter.give()
    );
}

// predict_in_place(driver) -> None
//
// Make recorded traces mark results that would be written over a gradient if Rekindle's own
// dispatch mode were off.
PyObject* predict_in_place(PyObject* arguments) {
    Session& session = session_in(arguments);
    const Locked lock;
    session.taking_over.predicted = true;
    return nothing();
}

// new_driver(budget, device, assumed, learns, evicts_held_last, score, chooser) -> session
//
// Make a session; see `Session` in memory/session.h. A negative `budget` means no limit.
// `evicts_held_last`: evict values that the user's variables hold as a last resort. `score`: the
// settings (costs, by_size, by_staleness, root) of a built-in policy. `chooser`: a policy written
// in Python that replaces the built-in one, or None.
PyObject* new_driver(PyObject* arguments) {
    long long budget = 0;
    const char* device = nullptr;
    int assumed = 0;
    int learns = 0;
    int evicts_held_last = 0;
    int costs = 0;
    int by_size = 0;
    int by_staleness = 0;
    int root = 0;
    PyObject* chooser = nullptr;
    parse(
        arguments,
        "Lsppp(ippp)O",
        &budget,
        &device,
        &assumed,
        &learns,
        &evicts_held_last,
        &costs,
        &by_size,
        &by_staleness,
        &root,
        &chooser
    );
    const rekindle::Policy policy{
        static_cast<rekindle::Costs>(costs), by_size != 0, by_staleness != 0, root != 0
    };
    std::unique_ptr<PythonChooser> own;
    if (chooser != Py_None) {
        own = std::make_unique<PythonChooser>(chooser);
    }
    rekindle::release_deferred();
    rekindle::notify_gone();
    const rekindle::Bytes most = budget < 0 ? rekindle::UNLIMITED : budget;
    const c10::Device where(device);
    auto session = c10::make_intrusive<Session>(
        most, where, assumed != 0, learns != 0, policy, std::move(own)
    );
    if (learns != 0) {
        session->steps = std::make_unique<rekindle::Learner>(*session);
        session->observers.steps = session->steps.get();
    }
    session->held.evicts_last = evicts_held_last != 0 && rekindle::can_make_placeholders();
    {
        const Locked lock;
        session->storages.open();
    }
    Session* made = session.get();
    Object capsule(PyCapsule_New(made, rekindle::SESSION, &rekindle::release_session));
    static_cast<void>(session.release());
    return capsule.give();
}

// driver_id(driver) -> int
//
// Return the id of the session. Calls from the core into Python pass this id to say which session
// they are about.
PyObject* driver_id(PyObject* arguments) {
    PyObject* session = nullptr;
    parse(arguments, "O", &session);
    return PyLong_FromSsize_t(session_of(session).observers.number);
}

// shares_key() -> bool
//
// Return True if PyTorch has kernels of its own at the core's dispatch key.
PyObject* shares_key(PyObject* /*arguments*/) {
    return PyBool_FromLong(rekindle::shares_key ? 1 : 0);
}

// is_fake_call(tensors) -> bool
//
// Return True if a call with these arguments concerns PyTorch's kernels at the core's dispatch key:
// the thread is in a FakeTensor mode in C++, or an argument is a fake tensor.
PyObject* is_fake_call(PyObject* arguments) {
    if (!rekindle::shares_key) {
        return PyBool_FromLong(0);
    }
    bool found = rekindle::is_in_fake_mode();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); ++i) {
        PyObject* each = PyTuple_GET_ITEM(arguments, i);
        found = found || (THPVariable_Check(each) && rekindle::is_fake(THPVariable_Unpack(each)));
    }
    return PyBool_FromLong(found ? 1 : 0);
}

// rejoin() -> None
//
// Include the core's dispatch key again in this thread if it works within the active budget and
// other code has cleared the key.
PyObject* rejoin(PyObject* /*arguments*/) {
    rekindle::rejoin();
    return nothing();
}

// bind_thread(driver) -> None
//
// Make the current thread run within the budget of `session`, or within no budget (None).
PyObject* bind_thread(PyObject* arguments) {
    PyObject* session = nullptr;
    parse(arguments, "O", &session);
    rekindle::join(session == Py_None ? nullptr : &session_of(session));
    return nothing();
}

// activate(driver) -> None
//
// Make `session` the active session of this process, which handles operators.
PyObject* activate(PyObject* arguments) {
    PyObject* session = nullptr;
    parse(arguments, "O", &session);
    if (session_of(session).uses_arena) {
        rekindle::the_arena().open(session_of(session).engine.budget);
    }
    rekindle::set_active(c10::intrusive_ptr<Session>::reclaim_copy(&session_of(session)));
    return nothing();
}

// deactivate(driver) -> None
//
// End the budget of `session`: restore evicted values that the program holds. From now on, process
// each freed storage at once.
PyObject* deactivate(PyObject* arguments) {
    PyObject* session = nullptr;
    parse(arguments, "O", &session);
    rekindle::set_active({});
    rekindle::translate_errors(session_of(session), [&] {
        const Locked lock;
        session_of(session).close();
    });
    rekindle::notify_policy(session_of(session));
    rekindle::release_deferred();
    return nothing();
}

// put_method(type, name, function) -> None
//
// Set a method of a type, which may be a C type that refuses assignment from Python.
PyObject* put_method(PyObject* arguments) {
    PyObject* owner = nullptr;
    const char* name = nullptr;
    PyObject* function = nullptr;
    parse(arguments, "O!sO", &PyType_Type, &owner, &name, &function);
    auto* type = reinterpret_cast<PyTypeObject*>(owner);
    must(PyDict_SetItemString(type->tp_dict, name, function) == 0);
    PyType_Modified(type);
    return nothing();
}

// make_room(driver, nbytes, who) -> None
//
// Evict values until `nbytes` fit into the budget. `who`: name for the error message of the code
// that needs this memory.
PyObject* make_room(PyObject* arguments) {
    PyObject* capsule = nullptr;
    long long bytes = 0;
    const char* who = nullptr;
    parse(arguments, "OLs", &capsule, &bytes, &who);
    Session& session = session_of(capsule);
    rekindle::translate_errors(session, [&] {
        Locked lock;
        session.frees.process_pending();
        rekindle::retry_evicting_held(session, lock, [&] { session.room.make_room(bytes, who); });
        session.room.refuse_for_tests(who);
    });
    return nothing();
}

// never_recompute(driver, change) -> None
//
// Enter (`change` = 1) or leave (-1) a block `with rekindle.never_recompute()`.
PyObject* never_recompute(PyObject* arguments) {
    PyObject* capsule = nullptr;
    int more = 0;
    parse(arguments, "Oi", &capsule, &more);
    const Locked lock;
    session_of(capsule).never_recompute += more;
    return nothing();
}

// unpack(handle) -> Tensor
//
// Return the saved tensor of a saved-tensor handle, for compiled autograd.
PyObject* unpack(PyObject* arguments) {
    PyObject* handle = nullptr;
    parse(arguments, "O", &handle);
    return THPVariable_Wrap(rekindle::unpack(handle));
}

// check(driver) -> None
//
// Raise AssertionError if an invariant of the session or its engine does not hold.
PyObject* check(PyObject* arguments) {
    Session& session = session_in(arguments);
    const Locked lock;
    session.frees.process_pending();
    if (const auto fault = session.engine.check()) {
        const auto storage = static_cast<long long>(fault->storage);
        PyErr_Format(PyExc_AssertionError, "%s (storage %lld)", fault->what, storage);
        Object::throw_error();
    }
    const char* fault = session.registry.fault(session.engine.first_storage());
    if (fault == nullptr && session.events.swapper != nullptr) {
        fault = session.events.swapper->fault();
    }
    if (fault != nullptr) {
        PyErr_SetString(PyExc_AssertionError, fault);
        Object::throw_error();
    }
    return nothing();
}

// The replacement of `sys.unraisablehook`, around the function `hook`. It must not be Python code:
// Python would raise the interrupt before such code returns, and call the hook again.
PyObject* on_unraisable(PyObject* hook, PyObject* unraisable) {
    PyObject* type = PyObject_GetAttrString(unraisable, "exc_type");
    if (type == nullptr) {
        return nullptr;
    }
    const bool interrupt = PyErr_GivenExceptionMatches(type, PyExc_KeyboardInterrupt) != 0;
    if (interrupt) {
        // A new error: the traceback of this one would keep the variables of the finalizer alive.
        rekindle::raise_object_later(type);
    }
    Py_DECREF(type);
    return interrupt ? Py_NewRef(Py_None) : PyObject_CallOneArg(hook, unraisable);
}

// interrupts_kept(hook) -> function
//
// Return a function for `sys.unraisablehook`: it raises KeyboardInterrupt in the main thread a
// moment later, and passes other errors to `hook`.
PyObject* interrupts_kept(PyObject* arguments) {
    static PyMethodDef definition{"unraisablehook", &on_unraisable, METH_O, nullptr};
    PyObject* hook = nullptr;
    parse(arguments, "O", &hook);
    return PyCFunction_New(&definition, hook);
}

// about_to_fork() -> None
//
// Prepare for a fork by this thread: take the session mutex.
PyObject* about_to_fork(PyObject* /*arguments*/) {
    rekindle::about_to_fork();
    return nothing();
}

// forked_here() -> None
//
// Release the session mutex in the parent process after a fork.
PyObject* forked_here(PyObject* /*arguments*/) {
    rekindle::forked();
    return nothing();
}

// forked() -> None
//
// Release the session mutex in the child process after a fork. It runs within no budget.
PyObject* forked(PyObject* /*arguments*/) {
    rekindle::forked();
    rekindle::join(nullptr);
    rekindle::set_active({});
    rekindle::the_arena().close();
    return nothing();
}

// arena() -> (int, int)
//
// Return the bytes that the CPU arena has mapped: those in use, and those kept free.
PyObject* arena(PyObject* /*arguments*/) {
    const rekindle::Arena& found = rekindle::the_arena();
    return Py_BuildValue(
        "LL", static_cast<long long>(found.live()), static_cast<long long>(found.cached())
    );
}

// drivers_alive() -> int
//
// Return the number of sessions in this process, also of ended budgets whose graphs still exist.
PyObject* drivers_alive(PyObject* /*arguments*/) {
    return PyLong_FromSize_t(rekindle::drivers_alive());
}

// count_allocations() -> bool
//
// Start to count allocations of PyTorch's CPU allocator. Return True if counting is possible.
PyObject* count_allocations(PyObject* /*arguments*/) {
    rekindle::count_allocations();
    return PyBool_FromLong(rekindle::allocations_are_counted() ? 1 : 0);
}

// -- the module -----------------------------------------------------------------------------------

// Turn an error of the core into a Python exception. The first argument of every function that may
// throw such an error is a session.
template <PyObject* (*function)(PyObject*)>
PyObject* in_words_of(PyObject* arguments) {
    try {
        return function(arguments);
    } catch (const rekindle::Error& error) {
        if (PyTuple_GET_SIZE(arguments) > 0) {
            error.raise(session_of(PyTuple_GET_ITEM(arguments, 0)));
        }
        throw;
    }
}

// Call `function`, and turn C++ exceptions into Python exceptions, because no C++ exception may
// pass through Python's C code.
template <PyObject* (*function)(PyObject*)>
PyObject* guarded(PyObject* /*module*/, PyObject* arguments) {
    try {
        return in_words_of<function>(arguments);
    } catch (...) {
        rekindle::set_error();
        return nullptr;
    }
}

template <PyObject* (*function)(PyObject*)>
constexpr PyMethodDef method(const char* name) {
    return {name, &guarded<function>, METH_VARARGS, nullptr};
}

// NOLINTNEXTLINE(modernize-avoid-c-arrays,bugprone-throwing-static-initialization): for Python
PyMethodDef methods[] = {
    method<start>("start"),
    method<learn_traits>("learn_traits"),
    method<backward_node>("backward_node"),
    method<new_driver>("new_driver"),
    method<driver_id>("driver_id"),
    method<shares_key>("shares_key"),
    method<is_fake_call>("is_fake_call"),
    method<rejoin>("rejoin"),
    method<bind_thread>("bind_thread"),
    method<activate>("activate"),
    method<deactivate>("deactivate"),
    method<rekindle::numbers>("numbers"),
    method<rekindle::has_room>("has_room"),
    method<rekindle::devices_used>("devices_used"),
    method<rekindle::set_peak>("set_peak"),
    method<rekindle::take_samples>("take_samples"),
    method<rekindle::space_samples>("space_samples"),
    method<rekindle::set_budget>("set_budget"),
    method<rekindle::keep_reserved>("keep_reserved"),
    method<rekindle::backoff>("backoff"),
    method<
        rekindle::
            set_flag<&Session::observers, &Observers::due, &rekindle::Notifications::tell_ranges>>(
        "tell_ranges"
    ),
    method<rekindle::set_flag<&Session::room, &Room::stepping>>("stepping"),
    method<
        rekindle::
            set_flag<&Session::observers, &Observers::due, &rekindle::Notifications::models_due>>(
        "models_due"
    ),
    method<rekindle::new_parameters>("new_parameters"),
    method<rekindle::tensors_within>("tensors_within"),
    method<rekindle::register_tensors>("register_tensors"),
    method<rekindle::begin_optimizer_step>("begin_optimizer_step"),
    method<rekindle::save_before_optimizer_step>("save_before_optimizer_step"),
    method<rekindle::evicted_bytes>("evicted_bytes"),
    method<rekindle::add_module_tensor>("add_module_tensor"),
    method<rekindle::has_new_peak>("has_new_peak"),
    method<rekindle::note_states>("note_states"),
    method<rekindle::peak_snapshot>("peak_snapshot"),
    method<rekindle::snapshot>("snapshot"),
    method<rekindle::expect_peak>("expect_peak"),
    method<rekindle::program_tensors>("program_tensors"),
    method<rekindle::kept>("kept"),
    method<rekindle::last_unit>("last_unit"),
    method<rekindle::reopen_trials>("reopen_trials"),
    method<rekindle::audit>("audit"),
    method<rekindle::recomputed_differently>("recomputed_differently"),
    method<rekindle::keep>("keep"),
    method<make_room>("make_room"),
    method<put_method>("put_method"),
    method<rekindle::about_to_resize>("about_to_resize"),
    method<rekindle::resized>("resized"),
    method<rekindle::mark_externally_writable>("mark_externally_writable"),
    method<rekindle::about_to_write_unseen>("about_to_write_unseen"),
    method<rekindle::version_raised>("version_raised"),
    method<rekindle::bring_back>("bring_back"),
    method<rekindle::pin_exposed_address>("pin_exposed_address"),
    method<rekindle::evict_anything>("evict_anything"),
    method<rekindle::placeholders>("placeholders"),
    method<rekindle::record_without_grad>("record_without_grad"),
    method<rekindle::begin_reading>("begin_reading"),
    method<rekindle::end_reading>("end_reading"),
    method<rekindle::profiler_starts>("profiler_starts"),
    method<rekindle::profiler_stops>("profiler_stops"),
    method<rekindle::profilers_are_over>("profilers_are_over"),
    method<rekindle::release_recompute_sources>("release_recompute_sources"),
    method<rekindle::add_plan>("add_plan"),
    method<rekindle::retain_plans>("retain_plans"),
    method<rekindle::begin_step>("begin_step"),
    method<rekindle::end_step>("end_step"),
    method<rekindle::op_ids_of_step>("op_ids_of_step"),
    method<rekindle::recording_of_step>("recording_of_step"),
    method<rekindle::begin_recording>("begin_recording"),
    method<rekindle::recording>("recording"),
    method<rekindle::end_recording>("end_recording"),
    method<
        rekindle::
            set_flag<&Session::observers, &Observers::due, &rekindle::Notifications::notes_places>>(
        "notes_places"
    ),
    method<rekindle::suspend_origin_tracking>("suspend_origin_tracking"),
    method<rekindle::resume_origin_tracking>("resume_origin_tracking"),
    method<never_recompute>("never_recompute"),
    method<rekindle::swap>("swap"),
    method<rekindle::swapped>("swapped"),
    method<unpack>("unpack"),
    method<check>("check"),
    method<rekindle::signatures_seen>("signatures_seen"),
    method<rekindle::remember_workspaces>("remember_workspaces"),
    method<rekindle::take_new_workspaces>("take_new_workspaces"),
    method<rekindle::repeated_calls>("repeated_calls"),
    method<rekindle::set_flag<
        &Session::events,
        &Events::tests,
        &rekindle::TestHooks::evict_before_every_op>>("evict_before_every_op"),
    method<rekindle::evict_all>("evict_all"),
    method<rekindle::bytes_of_positions>("bytes_of_positions"),
    method<rekindle::longest_chain>("longest_chain"),
    method<rekindle::count_only>("count_only"),
    method<rekindle::counts_only>("counts_only"),
    method<rekindle::list_recomputed_ops>("list_recomputed_ops"),
    method<rekindle::recomputed_ops>("recomputed_ops"),
    method<rekindle::has_lock>("has_lock"),
    method<rekindle::openings>("openings"),
    method<rekindle::in_flight>("in_flight"),
    method<rekindle::disable_for_tests>("disable_for_tests"),
    method<rekindle::in_place>("in_place"),
    method<predict_in_place>("predict_in_place"),
    method<rekindle::window>("window"),
    method<rekindle::bytes_asked_for>("bytes_asked_for"),
    method<rekindle::fitted>("fitted"),
    method<rekindle::interrupt>("interrupt"),
    method<rekindle::refuse>("refuse"),
    method<rekindle::fix_costs>("fix_costs"),
    method<rekindle::set_clock_speed>("set_clock_speed"),
    method<rekindle::underestimated>("underestimated"),
    method<rekindle::open_journal>("open_journal"),
    method<rekindle::journal>("journal"),
    method<rekindle::remembered>("remembered"),
    method<rekindle::remember_at_most>("remember_at_most"),
    method<rekindle::tally>("tally"),
    method<rekindle::tallied>("tallied"),
    method<rekindle::places_in>("places_in"),
    method<rekindle::unwritten_bytes>("unwritten_bytes"),
    method<rekindle::set_flag<&Session::uses_arena>>("uses_arena"),
    method<arena>("arena"),
    method<count_allocations>("count_allocations"),
    method<drivers_alive>("drivers_alive"),
    method<interrupts_kept>("interrupts_kept"),
    method<about_to_fork>("about_to_fork"),
    method<forked_here>("forked_here"),
    method<forked>("forked"),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_torch", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr
};

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming, bugprone-reserved-identifier): Python names it.
PyMODINIT_FUNC PyInit__torch() {
    PyObject* made = PyModule_Create(&definition);
#ifdef REKINDLE_GUIDED
    constexpr int guided = 1;  // compiled with the counts of a training program (native/_build.py)
#else
    constexpr int guided = 0;
#endif
    if (made != nullptr) {
        PyModule_AddIntConstant(made, "guided", guided);
    }
    return made;
}
