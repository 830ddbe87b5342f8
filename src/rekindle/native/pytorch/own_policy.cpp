#include "own_policy.h"

#include <array>
#include <utility>

#include "conversions.h"
#include "gil.h"
#include "mutex.h"

namespace rekindle {

namespace {

// A storage as a policy sees it: `rekindle.policies.Candidate`.
struct CandidateObject final {
    PyObject_HEAD;
    Storage* storage;        // null: it is gone, and these were its last numbers
    PythonChooser* chooser;  // which knows its neighbors
    std::array<std::int64_t, 4> numbers;
};

std::array<std::int64_t, 4> numbers_of(const Storage& storage) noexcept {
    return {storage.nbytes, storage.cost, storage.last_access, storage.order};
}

CandidateObject& candidate_in(PyObject* object) noexcept {
    return *reinterpret_cast<CandidateObject*>(object);
}

// The lock may have to be waited for: a policy may hand what it knows to another thread.
template <std::size_t which>
PyObject* number_in(PyObject* object, void* /*closure*/) noexcept {
    const CandidateObject& view = candidate_in(object);
    const auto lock = locked_if_not_mine();
    const auto numbers = view.storage == nullptr ? view.numbers : numbers_of(*view.storage);
    return PyLong_FromLongLong(numbers[which]);
}

PyObject* is_resident(PyObject* object, void* /*closure*/) noexcept {
    const CandidateObject& view = candidate_in(object);
    const auto lock = locked_if_not_mine();
    return PyBool_FromLong(view.storage != nullptr && view.storage->resident ? 1 : 0);
}

// A list of what `each` visits.
template <class F>
PyObject* neighbors(PyObject* object, F&& each) noexcept {
    const CandidateObject& view = candidate_in(object);
    const auto lock = locked_if_not_mine();
    PyObject* list = PyList_New(0);
    if (list == nullptr || view.storage == nullptr) {
        return list;
    }
    bool failed = false;
    each(*view.storage, [&](Storage& neighbor) {
        PyObject* found = failed ? nullptr : view.chooser->view_of(neighbor);
        failed = found == nullptr || PyList_Append(list, found) != 0;
    });
    if (failed) {
        Py_CLEAR(list);
    }
    return list;
}

PyObject* parents(PyObject* object, PyObject* /*nothing*/) noexcept {
    return neighbors(object, [](Storage& storage, auto&& visit) { each_parent(storage, visit); });
}

PyObject* children(PyObject* object, PyObject* /*nothing*/) noexcept {
    return neighbors(object, [](Storage& storage, auto&& visit) { each_child(storage, visit); });
}

void free_candidate(PyObject* object) noexcept {
    PyTypeObject* type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

// With the GIL. Null: Python raised.
PyTypeObject* candidate_type() noexcept {
    static PyTypeObject* type = nullptr;
    if (type != nullptr) {
        return type;
    }
    // NOLINTBEGIN(modernize-avoid-c-arrays): for Python
    static PyGetSetDef attributes[] = {
        {"nbytes", &number_in<0>, nullptr, "Its size in bytes.", nullptr},
        {"cost", &number_in<1>, nullptr, "The cost of the calls that made it (ns).", nullptr},
        {"last_access", &number_in<2>, nullptr, "When it was read last (ns).", nullptr},
        {"order", &number_in<3>, nullptr, "Grows each time it becomes a candidate.", nullptr},
        {"resident", &is_resident, nullptr, "Whether it is in memory.", nullptr},
        {nullptr, nullptr, nullptr, nullptr, nullptr},
    };
    static PyMethodDef methods[] = {
        {"parents", &parents, METH_NOARGS, "What must be resident to compute it."},
        {"children", &children, METH_NOARGS, "What it is a parent of."},
        {nullptr, nullptr, 0, nullptr},
    };
    static PyType_Slot slots[] = {
        {Py_tp_dealloc, reinterpret_cast<void*>(&free_candidate)},
        {Py_tp_getset, attributes},
        {Py_tp_methods, methods},
        {0, nullptr},
    };
    // NOLINTEND(modernize-avoid-c-arrays)
    static PyType_Spec spec = {
        "rekindle.native.Candidate",
        sizeof(CandidateObject),
        0,
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        slots,
    };
    type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    return type;
}

// What Python was about to raise when an event came between.
class PendingError final {
public:
    PendingError() {
        if (PyErr_Occurred() != nullptr) {
            error_.emplace().persist();
        }
    }

    PendingError(const PendingError&) = delete;
    PendingError& operator=(const PendingError&) = delete;
    PendingError(PendingError&&) = delete;
    PendingError& operator=(PendingError&&) = delete;

    // NOLINTNEXTLINE(bugprone-exception-escape): restore() does not throw, but does not say so
    ~PendingError() {
        if (error_) {
            error_->restore();
        }
    }

private:
    std::optional<python_error> error_;
};

}  // namespace

PythonChooser::PythonChooser(PyObject* object) : object_(object) {
    must(candidate_type() != nullptr);
    const Object remembers(PyObject_GetAttrString(object, "remembers"));
    const int truth = PyObject_IsTrue(remembers.get());
    must(truth >= 0);
    remembers_ = truth != 0;
    Py_INCREF(object_);
}

PythonChooser::~PythonChooser() {
    if (Py_IsInitialized() == 0) {
        return;
    }
    const Gil gil;
    for (const auto& [storage, object] : views_) {
        CandidateObject& view = candidate_in(object);
        view.numbers = numbers_of(*storage);
        view.storage = nullptr;
        Py_DECREF(object);
    }
    Py_DECREF(object_);
    error_.reset();
}

PyObject* PythonChooser::view_of(Storage& storage) {
    const auto found = views_.find(&storage);
    if (found != views_.end()) {
        return found->second;
    }
    PyTypeObject* type = candidate_type();
    PyObject* made = type->tp_alloc(type, 0);
    if (made != nullptr) {
        candidate_in(made).storage = &storage;
        candidate_in(made).chooser = this;
        views_.emplace(&storage, made);
    }
    return made;
}

void PythonChooser::disposed(Storage& storage) noexcept {
    const auto found = views_.find(&storage);
    if (found == views_.end() || Py_IsInitialized() == 0) {
        return;
    }
    const Gil gil;
    PyObject* object = found->second;
    views_.erase(found);
    candidate_in(object).numbers = numbers_of(storage);
    candidate_in(object).storage = nullptr;
    Py_DECREF(object);
}

void PythonChooser::call(const char* method, Storage& storage) {
    if (Py_IsInitialized() == 0) {
        return;
    }
    const Gil gil;
    const PendingError pending;
    PyObject* view = view_of(storage);
    PyObject* done = view == nullptr ? nullptr : PyObject_CallMethod(object_, method, "O", view);
    if (done == nullptr) {
        keep_error();
    }
    Py_XDECREF(done);
}

Nanoseconds PythonChooser::recompute_ns(Storage& storage) {
    if (Py_IsInitialized() == 0) {
        return storage.cost;
    }
    const Gil gil;
    const PendingError pending;
    PyObject* view = view_of(storage);
    PyObject* told =
        view == nullptr ? nullptr : PyObject_CallMethod(object_, "recompute_ns", "O", view);
    const Nanoseconds found = told == nullptr ? -1 : PyLong_AsLongLong(told);
    Py_XDECREF(told);
    if (PyErr_Occurred() != nullptr) {
        keep_error();
        return storage.cost;
    }
    return found;
}

Storage* PythonChooser::choose(Nanoseconds now) {
    if (Py_IsInitialized() == 0) {
        return nullptr;
    }
    const Gil gil;
    const PendingError pending;
    throw_error();
    const Object chosen(PyObject_CallMethod(object_, "choose", "L", static_cast<long long>(now)));
    if (chosen.get() == Py_None) {
        return nullptr;
    }
    if (Py_TYPE(chosen.get()) == candidate_type()) {
        Storage* storage = candidate_in(chosen.get()).storage;
        if (candidate_in(chosen.get()).chooser == this && storage != nullptr &&
            storage->order >= 0) {
            return storage;
        }
    }
    PyErr_Format(
        PyExc_ValueError,
        "%R.choose(%lld) returned %R: return one of the candidates, which add() was called with "
        "and remove() was not since, or None if there is none",
        object_,
        static_cast<long long>(now),
        chosen.get()
    );
    Object::throw_error();
}

// With the GIL: Python has just raised. One that nobody has seen is the cause of the next ones.
void PythonChooser::keep_error() {
    if (error_) {
        PyErr_WriteUnraisable(object_);
        return;
    }
    error_.emplace().persist();
    failed_.store(true, std::memory_order_relaxed);
}

// With the GIL and the core's lock.
void PythonChooser::throw_error() {
    if (!error_) {
        return;
    }
    python_error error = std::move(*error_);
    error_.reset();
    failed_.store(false, std::memory_order_relaxed);
    throw error;
}

void PythonChooser::raise_error_now() {
    const Locked lock;
    const Gil gil;
    throw_error();
}

}  // namespace rekindle
