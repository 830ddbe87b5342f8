#define PY_SSIZE_T_CLEAN
#include "python.h"

#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "gil.h"
#include "swapper.h"
#include "without_gil.h"

namespace rekindle {

namespace {

struct Python final {
    PyObject* answers = nullptr;
    PyTypeObject* tensor = nullptr;
    PyTypeObject* parameter = nullptr;
};

Python& python() noexcept {
    static Python made;
    return made;
}

// Raises the exception that the method `name` of Python's returns.
template <class... Numbers>
[[noreturn]] void raise_what(const char* name, const char* format, Numbers... numbers) {
    python_error raised;
    {
        const Gil gil;
        PyObject* error = PyObject_CallMethod(python().answers, name, format, numbers...);
        if (error != nullptr) {  // else the call itself raised
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
            Py_DECREF(error);
        }
        raised.persist();
    }
    throw raised;
}

}  // namespace

WithoutGil::WithoutGil() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
        saved_ = PyEval_SaveThread();
    }
}

WithoutGil::~WithoutGil() {
    if (saved_ != nullptr) {
        PyEval_RestoreThread(static_cast<PyThreadState*>(saved_));
    }
}

void meet_python(PyObject* answers, PyObject* tensor, PyObject* parameter) {
    Py_INCREF(answers);  // for good: drivers outlive modules
    Py_INCREF(tensor);
    Py_INCREF(parameter);
    python().answers = answers;
    python().tensor = reinterpret_cast<PyTypeObject*>(tensor);
    python().parameter = reinterpret_cast<PyTypeObject*>(parameter);
}

bool is_plain_object(const c10::TensorImpl& tensor) noexcept {
    const PyObject* object = tensor.pyobj_slot()->load_pyobj();
    if (object == nullptr) {
        return true;
    }
    const PyTypeObject* type = Py_TYPE(object);
    return type == python().tensor || type == python().parameter;
}

bool is_parameter_object(const c10::TensorImpl& tensor) noexcept {
    const PyObject* object = tensor.pyobj_slot()->load_pyobj();
    return object != nullptr && PyType_IsSubtype(Py_TYPE(object), python().parameter) != 0;
}

const void* object_of(const c10::TensorImpl& tensor) noexcept {
    return tensor.pyobj_slot()->load_pyobj();
}

bool is_out_of_memory(const std::exception& error) {
    const auto* raised = dynamic_cast<const python_error*>(&error);
    if (raised == nullptr || raised->type == nullptr) {
        return false;
    }
    const Gil gil;
    const auto is_a = [&](const char* kind) {
        PyObject* found = PyObject_GetAttrString(python().answers, kind);
        const bool matches =
            found != nullptr && PyErr_GivenExceptionMatches(raised->type, found) != 0;
        Py_XDECREF(found);
        PyErr_Clear();
        return matches;
    };
    return is_a("full") && !is_a("not_full");
}

at::Tensor detached(const at::Tensor& tensor) {
    if (is_plain_object(*tensor.unsafeGetTensorImpl())) {
        return tensor.detach();
    }
    const Gil gil;
    PyObject* object = THPVariable_Wrap(tensor);
    PyObject* found = object == nullptr ? nullptr : PyObject_CallMethod(object, "detach", nullptr);
    Py_XDECREF(object);
    if (found == nullptr || !THPVariable_Check(found)) {
        Py_XDECREF(found);
        python_error raised;
        raised.persist();
        throw raised;
    }
    at::Tensor made = THPVariable_Unpack(found);
    Py_DECREF(found);
    return made;
}

namespace {

// Calls the method `name` of Python's, and has `take` look at what it returns; what either raises
// is thrown.
template <class F, class... Numbers>
void ask_and(F&& take, const char* name, const char* format, Numbers... numbers) {
    if (Py_IsInitialized() == 0) {
        return;
    }
    python_error raised;
    {
        const Gil gil;
        PyObject* told = PyObject_CallMethod(python().answers, name, format, numbers...);
        const bool done = told != nullptr && take(told);
        Py_XDECREF(told);
        if (done) {
            return;
        }
        raised.persist();
    }
    throw raised;
}

// Likewise, where it returns nothing of interest.
template <class... Numbers>
void ask(const char* name, const char* format, Numbers... numbers) {
    ask_and([](PyObject*) { return true; }, name, format, numbers...);
}

}  // namespace

void tell_samples(Driver& driver) {
    driver.samples_due = false;
    ask("sample", "n", driver.number());
}

void tell_owners(Driver& driver) {
    driver.owners_due = false;
    ask("owners", "n", driver.number());
}

void tell_complaint(Driver& driver) {
    driver.swapper->complaint_due = false;
    if (Py_IsInitialized() != 0) {
        driver.swapper->copies.complain();
    }
}

void tell_places(Driver& driver) {
    driver.places_due = false;
    ask("places", "nL", driver.number(), static_cast<long long>(driver.operators()));
}

void tell_range(const Driver& driver, bool ends) {
    ask("range", "ni", driver.number(), ends ? 1 : 0);
}

void ask_for_lessons(const Driver& driver, std::int64_t met) {
    ask("lessons", "nL", driver.number(), static_cast<long long>(met));
}

std::optional<Read> what_is_read(const Driver& driver) {
    std::optional<Read> read;
    const auto take = [&](PyObject* told) {
        if (told == Py_None) {
            return true;
        }
        PyObject* tensors = nullptr;
        int saved = 0;
        if (PyArg_ParseTuple(told, "Op", &tensors, &saved) == 0) {
            return false;
        }
        read.emplace().saved = saved != 0;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
            const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors, i));
            if (has_memory(*tensor.unsafeGetTensorImpl())) {
                read->homes.push_back(tensor.storage().unsafeGetStorageImpl());
            }
            read->tensors.push_back(tensor);
        }
        return true;
    };
    ask_and(take, "what_is_read", "n", driver.number());
    return read;
}

void tell_peak(Driver& driver) {
    driver.look_due = false;
    if (Py_IsInitialized() == 0) {
        return;
    }
    const Gil gil;
    PyObject* done = PyObject_CallMethod(python().answers, "peak", "n", driver.number());
    if (done == nullptr) {
        PyErr_WriteUnraisable(python().answers);
    }
    Py_XDECREF(done);
}

namespace {

int say_gone(void* number) {
    PyObject* done =
        PyObject_CallMethod(python().answers, "gone", "n", reinterpret_cast<Py_ssize_t>(number));
    Py_XDECREF(done);
    return done == nullptr ? -1 : 0;
}

}  // namespace

// It may go in any thread, amid anything: the main one is told when it is safe.
void tell_gone(std::ptrdiff_t number) noexcept {
    if (Py_IsInitialized() != 0 && python().answers != nullptr) {
        // NOLINTNEXTLINE(performance-no-int-to-ptr): it takes no number
        Py_AddPendingCall(&say_gone, reinterpret_cast<void*>(number));
    }
}

bool has_attributes(const c10::TensorImpl& tensor) {
    PyObject* object = tensor.pyobj_slot()->load_pyobj();
    if (object == nullptr) {
        return false;
    }
    if (Py_TYPE(object) != python().tensor) {
        return true;
    }
    const Gil gil;
    PyObject* attributes = PyObject_GenericGetDict(object, nullptr);
    const bool any = attributes != nullptr && PyDict_GET_SIZE(attributes) != 0;
    Py_XDECREF(attributes);
    PyErr_Clear();
    return any;
}

void raise(const Driver& driver, const Shortage& shortage) {
    raise_what(
        "out_of_budget",
        "nLLLs",
        driver.number(),
        static_cast<long long>(shortage.needed),
        static_cast<long long>(shortage.memory),
        static_cast<long long>(shortage.budget),
        shortage.who.c_str()
    );
}

void raise(Driver& /*driver*/, const ChangedSize& change) {
    const auto now = static_cast<long long>(change.now);
    const auto before = static_cast<long long>(change.before);
    raise_what("changed_size", "sLL", change.facts->name.c_str(), now, before);
}

void raise(Driver& /*driver*/, const ResizedInput& change) {
    const auto now = static_cast<long long>(change.now);
    raise_what("resized_input", "LL", now, static_cast<long long>(change.before));
}

void raise(Driver& /*driver*/, const ModifiedInput& change) {
    const auto now = static_cast<long long>(change.now);
    const auto expected = static_cast<long long>(change.expected);
    raise_what("modified_input", "sLL", change.site, now, expected);
}

void raise(Driver& /*driver*/, const ForeignInput& change) {
    raise_what("foreign_input", "s", change.site);
}

void raise(const Driver& driver, const Full& device) {
    raise_what("device_full", "ns", driver.number(), device.said.c_str());
}

void raise(const Driver& driver, const Elsewhere& device) {
    raise_what("met_elsewhere", "ns", driver.number(), device.met.str().c_str());
}

void raise(Driver& /*driver*/, const InAGraph& value) {
    raise_what("recomputed_in_a_graph", "s", value.site);
}

void raise(const Driver& driver, const CopyLost& value) {
    raise_what("swap_failed", "ns", driver.number(), value.site.c_str());
}

void raise(Driver& /*driver*/, const Unseen& unseen) {
    const char* what = unseen.by_python ? "unseen_by_python" : "unseen_collective";
    raise_what(what, "s", unseen.facts->name.c_str());
}

}  // namespace rekindle
