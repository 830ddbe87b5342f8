// Python module functions for snapshots of memory, and the conversion of snapshots to tuples.
#include <array>
#include <utility>
#include <vector>

#include "../base/mutex.h"
#include "../memory/notify.h"
#include "../memory/session.h"
#include "../memory/take_snapshot.h"
#include "../torch/pyobjects.h"
#include "methods.h"

namespace rekindle {

namespace functions {

namespace {

// A tensor of optimizer state, and the Python object of its parameter.
using State = std::pair<at::Tensor, const void*>;

// Add the tensors in `entries`, an optimizer's dict of state for `parameter`, to `found`. Also add
// the tensors in lists among the values of this dict.
void add_states(PyObject* entries, const void* parameter, std::vector<State>& found) {
    PyObject* name = nullptr;
    PyObject* value = nullptr;
    const auto add = [&](PyObject* each) {
        if (THPVariable_Check(each)) {
            found.emplace_back(THPVariable_Unpack(each), parameter);
        }
    };
    for (Py_ssize_t n = 0; PyDict_Check(entries) && PyDict_Next(entries, &n, &name, &value) != 0;) {
        add(value);
        for (Py_ssize_t i = 0; PyList_Check(value) && i < PyList_GET_SIZE(value); ++i) {
            add(PyList_GET_ITEM(value, i));
        }
    }
}

// Return the state tensors of a list of optimizers. Must be called without the session mutex,
// because an optimizer's `state` may be a property that runs user code.
std::vector<State> states_of(PyObject* optimizers) {
    std::vector<State> found;
    const Py_ssize_t n_optimizers = PyList_Size(optimizers);
    must(n_optimizers >= 0);
    for (Py_ssize_t i = 0; i < n_optimizers; ++i) {
        const Object state(PyObject_GetAttrString(PyList_GET_ITEM(optimizers, i), "state"));
        PyObject* parameter = nullptr;
        PyObject* entries = nullptr;
        for (Py_ssize_t n = 0; PyDict_Check(state.get()) &&
                               PyDict_Next(state.get(), &n, &parameter, &entries) != 0;) {
            add_states(entries, parameter, found);
        }
    }
    return found;
}

// Record in `snapshot` which allocations hold the optimizer state `states`. Needs the session
// mutex.
void add_to(Snapshot& snapshot, Session& session, const std::vector<State>& states) {
    if (std::exchange(snapshot.has_states, true)) {
        return;
    }
    session.frees.process_pending();
    for (const auto& [tensor, parameter] : states) {
        const c10::TensorImpl& state = *tensor.unsafeGetTensorImpl();
        add_owned(session, snapshot, state, Owned::Kind::state, parameter);
    }
}

PyObject* tuple_of(const Holder& holder) {
    return Py_BuildValue(
        "LLisKLL",
        static_cast<long long>(holder.nbytes),
        static_cast<long long>(holder.allocation),
        holder.flags,
        holder.site,
        reinterpret_cast<unsigned long long>(holder.parameter),
        static_cast<long long>(holder.storage),
        static_cast<long long>(holder.maker)
    );
}

PyObject* tuple_of(const Owned& owned) {
    return Py_BuildValue(
        "LiK",
        static_cast<long long>(owned.allocation),
        static_cast<int>(owned.kind),
        reinterpret_cast<unsigned long long>(owned.parameter)
    );
}

PyObject* tuple_of(const Snapshot& snapshot) {
    const ProgramLine& line = snapshot.line;
    const auto row = [](const auto& each) { return tuple_of(each); };
    return Py_BuildValue(
        "LLLL(sisi)NN",
        static_cast<long long>(snapshot.memory),
        static_cast<long long>(snapshot.clock),
        static_cast<long long>(snapshot.resident),
        static_cast<long long>(snapshot.cached),
        line.file.c_str(),
        line.number,
        line.library.c_str(),
        line.number_in_library,
        list_of(snapshot.holders, row),
        list_of(snapshot.owned, row)
    );
}

// Record that a module was given `tensor` as a parameter or as a buffer.
void add_module_tensor(Session& session, const c10::TensorImpl& tensor, bool parameter) {
    const Locked lock;
    session.observers.add_module_tensor(tensor, parameter);
}

// Return True if the snapshot taken at the peak of memory lacks optimizer state, which
// `note_states` adds.
bool has_new_peak(const Session& session) {
    const Locked lock;
    const Snapshot& peak = session.observers.peak_watch.snapshot;
    return peak.memory != 0 && !peak.has_states;
}

// Record in the snapshot taken at the peak of memory which allocations are state of these
// optimizers.
void note_states(Session& session, PyObject* optimizers) {
    const std::vector<State> states = states_of(optimizers);
    const Locked lock;
    add_to(session.observers.peak_watch.snapshot, session, states);
}

// Return the snapshot taken at the peak of memory: (memory, clock, resident, cached, line, holders,
// owned). See `Snapshot` in memory/observers/snapshot.h.
PyObject* peak_snapshot(const Session& session) {
    Snapshot copy;
    {
        const Locked lock;
        copy = session.observers.peak_watch.snapshot;
    }
    return tuple_of(copy);
}

// Take a snapshot now, and a snapshot at each new peak of memory of `nbytes` or more.
void expect_peak(Session& session, std::int64_t nbytes) {
    ProgramLine line = program_line();
    const Locked lock;
    rekindle::expect_peak(session, nbytes, std::move(line));
}

// Return the program's tensors whose values are resident, without tensors of which only the bytes
// are counted.
PyObject* program_tensors(Session& session) {
    std::vector<at::Tensor> found;
    {
        const Locked lock;
        found = rekindle::program_tensors(session);
    }
    std::erase_if(found, [](const at::Tensor& each) {
        // Leave out tensors without a Python object, because Python code cannot refer to them.
        return object_of(*each.unsafeGetTensorImpl()) == nullptr;
    });
    Object list(PyList_New(static_cast<Py_ssize_t>(found.size())));
    for (std::size_t i = 0; i < found.size(); ++i) {
        Object tensor(THPVariable_Wrap(found[i]));
        PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), tensor.give());
    }
    return list.give();
}

// Take a snapshot now, and return it as `peak_snapshot` does.
PyObject* snapshot(Session& session, PyObject* optimizers) {
    const std::vector<State> states = states_of(optimizers);
    ProgramLine line = program_line();
    Snapshot made;
    {
        const Locked lock;
        take_snapshot(session, made, std::move(line));
        add_to(made, session, states);
    }
    return tuple_of(made);
}

}  // namespace

}  // namespace functions

PyMethodDef* snapshot_methods() {
    static std::array all{
        method<functions::add_module_tensor>("add_module_tensor"),
        method<functions::has_new_peak>("has_new_peak"),
        method<functions::note_states>("note_states"),
        method<functions::peak_snapshot>("peak_snapshot"),
        method<functions::snapshot>("snapshot"),
        method<functions::expect_peak>("expect_peak"),
        method<functions::program_tensors>("program_tensors"),
        PyMethodDef{},
    };
    return all.data();
}

}  // namespace rekindle
