// Conversions between Python objects and the core's types, for functions of the Python module.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "../base/mutex.h"
#include "../memory/deferred_releases.h"
#include "../memory/session.h"

namespace rekindle {

inline constexpr const char* SESSION = "rekindle.native.Session";

class Object final {  // Owning reference to a Python object.
public:
    explicit Object(PyObject* object) : object_(object) {
        if (object_ == nullptr) {
            throw_error();
        }
    }

    Object(const Object&) = delete;
    Object& operator=(const Object&) = delete;

    ~Object() { Py_XDECREF(object_); }

    PyObject* get() const noexcept { return object_; }

    PyObject* give() noexcept { return std::exchange(object_, nullptr); }

    [[noreturn]] static void throw_error() {
        python_error raised;
        raised.persist();
        throw raised;
    }

private:
    PyObject* object_;
};

// Throw the pending Python error unless `done` is true.
inline void must(bool done) {
    if (!done) {
        Object::throw_error();
    }
}

// Return a list of `make(item)` for each of `items`. `make` returns a new reference, or null after
// a Python error.
template <class Items, class F>
PyObject* list_of(const Items& items, F&& make) {
    Object list(PyList_New(static_cast<Py_ssize_t>(items.size())));
    Py_ssize_t next = 0;
    for (const auto& each : items) {
        Object entry(make(each));
        PyList_SET_ITEM(list.get(), next++, entry.give());
    }
    return list.give();
}

// Scope in which Python's garbage collector does not run: it might call finalizers of the program,
// which run operators.
class WithoutCollection final {
public:
    WithoutCollection() : was_on_(PyGC_Disable() != 0) {}

    WithoutCollection(const WithoutCollection&) = delete;
    WithoutCollection& operator=(const WithoutCollection&) = delete;

    ~WithoutCollection() {
        if (was_on_) {
            PyGC_Enable();
        }
    }

private:
    const bool was_on_;
};

// Call the method `name` of `object` with `values`, and pass the result to `take`. If the method
// raises a Python error, or `take` returns false because it raised one, throw this error.
// References to Python objects among `values` are consumed. The caller holds the GIL.
template <class F, class... Values>
void call_method(
    PyObject* object, F&& take, const char* name, const char* format, Values... values
) {
    const WithoutCollection uncollected;
    const Object result(PyObject_CallMethod(object, name, format, values...));
    must(std::forward<F>(take)(result.get()));
}

// Parse a tuple as `PyArg_ParseTuple` does. If it does not match `format`, throw the Python error.
template <class... Pointers>
void parse(PyObject* tuple, const char* format, Pointers... pointers) {
    must(PyArg_ParseTuple(tuple, format, pointers...) != 0);
}

inline Session& session_of(PyObject* capsule) {
    void* found = PyCapsule_GetPointer(capsule, SESSION);
    must(found != nullptr);
    return *static_cast<Session*>(found);
}

// Destructor of the Python capsule that holds a session.
inline void release_session(PyObject* capsule) {
    if (void* found = PyCapsule_GetPointer(capsule, SESSION)) {
        release_without_waiting(c10::intrusive_ptr<Session>::reclaim(static_cast<Session*>(found)));
    }
}

inline const c10::TensorImpl& tensor_of(PyObject* object) {
    TORCH_CHECK_TYPE(THPVariable_Check(object), "wanted a tensor, got ", Py_TYPE(object)->tp_name);
    return *THPVariable_Unpack(object).unsafeGetTensorImpl();
}

// Return the integers of a Python sequence.
inline std::vector<std::int64_t> numbers_in(PyObject* list) {
    const Object each(PySequence_Fast(list, "numbers: a list"));
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(each.get());
    std::vector<std::int64_t> found(static_cast<std::size_t>(n));
    for (Py_ssize_t i = 0; i < n; ++i) {
        const long long number = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(each.get(), i));
        must(number != -1 || PyErr_Occurred() == nullptr);
        found[static_cast<std::size_t>(i)] = number;
    }
    return found;
}

// Return `numbers` as a Python tuple of integers.
inline PyObject* tuple_of(std::span<const std::int64_t> numbers) {
    Object made(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        Object number(PyLong_FromLongLong(numbers[i]));
        PyTuple_SET_ITEM(made.get(), static_cast<Py_ssize_t>(i), number.give());
    }
    return made.give();
}

// Return the bytes of an array of 64-bit words, which Python reads as `array("q")`.
template <class T>
PyObject* bytes_of(std::span<const T> things) {
    static_assert(sizeof(T) % sizeof(std::int64_t) == 0);
    const auto n = static_cast<Py_ssize_t>(things.size_bytes());
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(things.data()), n);
}

inline PyObject* nothing() {
    Py_RETURN_NONE;
}

}  // namespace rekindle
