// The Python module `_torch`, by which Python calls the native core. Each file in this
// folder defines some functions of the module, and lists them in a table. The Python code that
// calls these functions is in rekindle.pytorch.native.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
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
#include "../memory/forks.h"
#include "../memory/notify.h"
#include "../memory/room/own_policy.h"
#include "../memory/room/swapper.h"
#include "../memory/session.h"
#include "../steps/learner.h"
#include "../torch/dispatch_key.h"
#include "../torch/pyobjects.h"
#include "../torch/raised.h"
#include "conversions.h"
#include "methods.h"
#include "set_data.h"

namespace {

using rekindle::Events;
using rekindle::Given;
using rekindle::Locked;
using rekindle::method;
using rekindle::must;
using rekindle::nothing;
using rekindle::Object;
using rekindle::Observers;
using rekindle::parse;
using rekindle::PythonChooser;
using rekindle::Room;
using rekindle::Session;
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

// Install the core in PyTorch, once per process. `answers`: the object that answers calls into
// Python. `tensor` and `parameter`: the classes `torch.Tensor` and `torch.nn.Parameter`. `traits`:
// see `learn_all_traits`. `effects`: namespaces of operators that are never recomputed, because
// they have external effects (R9, everything else runs once). `own`: the other namespaces of
// PyTorch's own operators, which are recomputed untried.
// `products` and `may_use_workspace`: parts of names of operators that sum products, and of
// operators that may use a workspace on a CPU. `in_place`: see `learn_all_in_place`.
// NOLINTNEXTLINE(readability-function-size): all arguments of one call from Python
void start(
    PyObject* answers,
    PyObject* tensor,
    PyObject* parameter,
    PyObject* traits,
    PyObject* effects,
    PyObject* own,
    PyObject* products,
    PyObject* may_use_workspace,
    PyObject* in_place
) {
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
}

// Register the traits (flags) of one operator that is defined after `start`, such as a function of
// the program.
void learn_traits(const char* name, std::int64_t flags) {
    rekindle::Traits made;
    made.flags = static_cast<std::uint32_t>(flags);
    const Locked lock;
    rekindle::learn_traits(name, made);
}

// Return the autograd node that runs on this thread: name, sequence number, whether its first input
// alone requires a gradient, and the parameter whose gradient it accumulates. None: no node runs.
//
// `torch._C._current_autograd_node` makes a Python object for the node. If all nodes of a long
// graph have one, PyTorch frees the graph by recursion, and the stack overflows.
PyObject* backward_node() {
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

// Make recorded traces mark results that would be written over a gradient if Rekindle's own
// dispatch mode were off.
void predict_in_place(Session& session) {
    const Locked lock;
    session.taking_over.predicted = true;
}

// Make a session; see `Session` in memory/session.h. A negative `budget` means no limit.
// `evicts_held_last`: evict values that the user's variables hold as a last resort. `score`: the
// settings (costs, by_size, by_staleness, root) of a built-in policy. `chooser`: a policy written
// in Python that replaces the built-in one, or None.
// NOLINTNEXTLINE(readability-function-size): all arguments of one call from Python
PyObject* new_driver(
    std::int64_t budget,
    const char* device,
    bool assumed,
    bool learns,
    bool evicts_held_last,
    PyObject* score,
    PyObject* chooser
) {
    int costs = 0;
    int by_size = 0;
    int by_staleness = 0;
    int root = 0;
    parse(score, "ippp", &costs, &by_size, &by_staleness, &root);
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
    auto session =
        c10::make_intrusive<Session>(most, where, assumed, learns, policy, std::move(own));
    if (learns) {
        session->steps = std::make_unique<rekindle::Learner>(*session);
        session->observers.steps = session->steps.get();
    }
    session->held.evicts_last = evicts_held_last && rekindle::can_make_placeholders();
    {
        const Locked lock;
        session->storages.open();
    }
    Session* made = session.get();
    Object capsule(PyCapsule_New(made, rekindle::SESSION, &rekindle::release_session));
    static_cast<void>(session.release());
    return capsule.give();
}

// Return the id of the session. Calls from the core into Python pass this id to say which session
// they are about.
std::int64_t driver_id(Session& session) {
    return session.observers.number;
}

// Return True if PyTorch has kernels of its own at the core's dispatch key.
bool shares_key() {
    return rekindle::shares_key;
}

// Return True if a call with these arguments concerns PyTorch's kernels at the core's dispatch key:
// the thread is in a FakeTensor mode in C++, or an argument is a fake tensor.
bool is_fake_call(Given given) {
    if (!rekindle::shares_key) {
        return false;
    }
    bool found = rekindle::is_in_fake_mode();
    for (PyObject* each : given) {
        found = found || (THPVariable_Check(each) && rekindle::is_fake(THPVariable_Unpack(each)));
    }
    return found;
}

// Include the core's dispatch key again in this thread if it works within the active budget and
// other code has cleared the key.
void rejoin() {
    rekindle::rejoin();
}

// Make the current thread run within the budget of `session`, or within no budget (None).
void bind_thread(PyObject* session) {
    rekindle::join(session == Py_None ? nullptr : &session_of(session));
}

// Make `session` the active session of this process, which handles operators.
void activate(Session& session) {
    if (session.uses_arena) {
        rekindle::the_arena().open(session.engine.budget);
    }
    rekindle::set_active(c10::intrusive_ptr<Session>::reclaim_copy(&session));
}

// End the budget of `session`: restore evicted values that the program holds. From now on, process
// each freed storage at once.
void deactivate(Session& session) {
    rekindle::set_active({});
    {
        const Locked lock;
        session.close();
    }
    rekindle::notify_policy(session);
    rekindle::release_deferred();
}

// Set a method of a type, which may be a C type that refuses assignment from Python.
void put_method(PyObject* owner, const char* name, PyObject* function) {
    TORCH_CHECK_TYPE(PyType_Check(owner), "wanted a type");
    auto* type = reinterpret_cast<PyTypeObject*>(owner);
    must(PyDict_SetItemString(type->tp_dict, name, function) == 0);
    PyType_Modified(type);
}

// Evict values until `nbytes` fit into the budget. `who`: name for the error message of the code
// that needs this memory.
void make_room(Session& session, std::int64_t nbytes, const char* who) {
    Locked lock;
    session.frees.process_pending();
    rekindle::retry_evicting_held(session, lock, [&] { session.room.make_room(nbytes, who); });
    session.room.refuse_for_tests(who);
}

// Record that this thread's step of an optimizer begins or ends.
void stepping(Session& session, bool on, bool must_finish) {
    const Locked lock;
    session.room.stepping.set(on);
    session.events.must_finish.set(must_finish);
}

// Enter (`change` = 1) or leave (-1) a block `with rekindle.never_recompute()`.
void never_recompute(Session& session, std::int64_t change) {
    const Locked lock;
    session.never_recompute += static_cast<int>(change);
}

// Return the saved tensor of a saved-tensor handle, for compiled autograd.
PyObject* unpack(PyObject* handle) {
    return THPVariable_Wrap(rekindle::unpack(handle));
}

// Raise AssertionError if an invariant of the session or its engine does not hold.
void check(Session& session) {
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

// Return a function for `sys.unraisablehook`: it raises KeyboardInterrupt in the main thread a
// moment later, and passes other errors to `hook`.
PyObject* interrupts_kept(PyObject* hook) {
    static PyMethodDef definition{"unraisablehook", &on_unraisable, METH_O, nullptr};
    return PyCFunction_New(&definition, hook);
}

// Prepare for a fork by this thread: bring back what the child may read, and take the session
// mutex.
void about_to_fork() {
    if (const auto session = rekindle::active()) {
        rekindle::bring_for_child(*session);
    }
    rekindle::about_to_fork();
}

// Release the session mutex in the parent process after a fork.
void forked_here() {
    rekindle::forked();
}

// Release the session mutex in the child process after a fork. It runs within no budget.
void forked() {
    rekindle::forked();
    if (const auto session = rekindle::active()) {
        rekindle::leave_in_child(*session);
    }
    rekindle::join(nullptr);
    rekindle::set_active({});
    rekindle::the_arena().close(true);
}

// Return the bytes that the CPU arena has mapped: those in use, and those kept free.
PyObject* arena() {
    const rekindle::Arena& found = rekindle::the_arena();
    return Py_BuildValue(
        "LL", static_cast<long long>(found.live()), static_cast<long long>(found.cached())
    );
}

// Return the number of sessions in this process, also of ended budgets whose graphs still exist.
std::size_t drivers_alive() {
    return rekindle::drivers_alive();
}

// Start to count allocations of PyTorch's CPU allocator. Return True if counting is possible.
bool count_allocations() {
    rekindle::count_allocations();
    return rekindle::allocations_are_counted();
}

// -- the module -----------------------------------------------------------------------------------

PyMethodDef* module_methods() {
    static std::array all{
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
        method<rekindle::set_flag<
            &Session::observers,
            &Observers::due,
            &rekindle::Notifications::tell_ranges>>("tell_ranges"),
        method<stepping>("stepping"),
        method<rekindle::set_flag<
            &Session::observers,
            &Observers::due,
            &rekindle::Notifications::models_due>>("models_due"),
        method<make_room>("make_room"),
        method<put_method>("put_method"),
        method<rekindle::set_flag<
            &Session::observers,
            &Observers::due,
            &rekindle::Notifications::notes_places>>("notes_places"),
        method<never_recompute>("never_recompute"),
        method<unpack>("unpack"),
        method<check>("check"),
        method<predict_in_place>("predict_in_place"),
        method<rekindle::set_flag<&Session::uses_arena>>("uses_arena"),
        method<rekindle::set_flag<&Session::slices>>("slices"),
        method<arena>("arena"),
        method<count_allocations>("count_allocations"),
        method<drivers_alive>("drivers_alive"),
        method<interrupts_kept>("interrupts_kept"),
        method<about_to_fork>("about_to_fork"),
        method<forked_here>("forked_here"),
        method<forked>("forked"),
        PyMethodDef{},
    };
    return all.data();
}

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_torch", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr
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
    if (made == nullptr) {
        return nullptr;
    }
    PyModule_AddIntConstant(made, "guided", guided);
    for (PyMethodDef* table :
         {module_methods(),
          rekindle::held_methods(),
          rekindle::optimizer_methods(),
          rekindle::plan_methods(),
          rekindle::profiler_methods(),
          rekindle::snapshot_methods(),
          rekindle::stats_methods(),
          rekindle::step_methods(),
          rekindle::storage_methods(),
          rekindle::swap_methods(),
          rekindle::transcript_methods(),
          rekindle::test_methods()}) {
        PyModule_AddFunctions(made, table);
    }
    return made;
}
