// Makes functions of the Python module from C++ functions: converts arguments from Python objects
// and results to Python objects.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include "../ops/errors.h"
#include "../torch/raised.h"
#include "conversions.h"

namespace rekindle {

// Convert a Python object to `T`. If the object has another type, throw the Python error.
template <class T>
T from_python(PyObject* object) {
    using Plain = std::remove_cvref_t<T>;
    if constexpr (std::is_same_v<Plain, PyObject*>) {
        return object;
    } else if constexpr (std::is_same_v<Plain, Session>) {
        return session_of(object);
    } else if constexpr (std::is_same_v<Plain, c10::TensorImpl>) {
        return tensor_of(object);
    } else if constexpr (std::is_same_v<Plain, c10::StorageImpl>) {  // by its address
        void* address = PyLong_AsVoidPtr(object);
        must(address != nullptr || PyErr_Occurred() == nullptr);
        return *static_cast<c10::StorageImpl*>(address);
    } else if constexpr (std::is_same_v<Plain, const char*>) {
        const char* text = PyUnicode_AsUTF8(object);
        must(text != nullptr);
        return text;
    } else if constexpr (std::is_same_v<Plain, bool>) {
        const int truth = PyObject_IsTrue(object);
        must(truth >= 0);
        return truth != 0;
    } else if constexpr (std::is_same_v<Plain, double>) {
        const double number = PyFloat_AsDouble(object);
        must(number != -1.0 || PyErr_Occurred() == nullptr);
        return number;
    } else {
        static_assert(std::is_same_v<Plain, std::int64_t>);
        const long long number = PyLong_AsLongLong(object);
        must(number != -1 || PyErr_Occurred() == nullptr);
        return number;
    }
}

// Convert a result to a Python object. A `PyObject*` is one already. An array becomes a tuple.
template <class T>
PyObject* to_python(const T& value) {
    if constexpr (std::is_same_v<T, PyObject*>) {
        return value;
    } else if constexpr (std::is_same_v<T, bool>) {
        return PyBool_FromLong(value ? 1 : 0);
    } else if constexpr (std::is_integral_v<T>) {
        return PyLong_FromLongLong(static_cast<long long>(value));
    } else {
        return tuple_of(value);
    }
}

// The arguments of one call from Python. Functions of any number of arguments get them like this.
using Given = std::span<PyObject* const>;

template <class R, class... A, std::size_t... i>
PyObject* call(R (*function)(A...), Given given, std::index_sequence<i...> /*arguments*/) {
    if (given.size() != sizeof...(A)) {
        PyErr_Format(PyExc_TypeError, "got %zu arguments, wanted %zu", given.size(), sizeof...(A));
        Object::throw_error();
    }
    // The braces convert the arguments in order.
    // NOLINTNEXTLINE(misc-const-correctness): not const where an argument is a reference
    std::tuple<A...> arguments{from_python<A>(given[i])...};
    if constexpr (std::is_void_v<R>) {
        std::apply(function, arguments);
        return nothing();
    } else {
        return to_python(std::apply(function, arguments));
    }
}

template <class R, class... A>
PyObject* call(R (*function)(A...), Given given) {
    return call(function, given, std::index_sequence_for<A...>());
}

inline PyObject* call(bool (*function)(Given), Given given) {
    return to_python(function(given));
}

// Return true if the first argument of a function is a session.
template <class R, class... A>
constexpr bool is_of_session(R (* /*function*/)(A...)) {
    using First = std::tuple_element_t<0, std::tuple<A..., void*>>;
    return std::is_same_v<std::remove_cvref_t<First>, Session>;
}

// Call `function`, and turn an error of the core into a Python exception. Only functions of a
// session throw such errors, and they need no `translate_errors` of their own.
template <auto function>
PyObject* in_words_of(Given given) {
    if constexpr (is_of_session(function)) {
        try {
            return call(function, given);
        } catch (const Error& error) {
            error.raise(session_of(given[0]));
        }
    } else {
        return call(function, given);
    }
}

// Call `function`, and turn C++ exceptions into Python exceptions, because no C++ exception may
// pass through Python's C code.
template <auto function>
PyObject* guarded(PyObject* /*module*/, PyObject* const* first, Py_ssize_t n) {
    try {
        return in_words_of<function>(Given(first, static_cast<std::size_t>(n)));
    } catch (...) {
        set_error();
        return nullptr;
    }
}

// One entry of a table of functions. A table ends with an empty entry.
template <auto function>
PyMethodDef method(const char* name) {
    auto* pointer = reinterpret_cast<void (*)()>(&guarded<function>);
    return {name, reinterpret_cast<PyCFunction>(pointer), METH_FASTCALL, nullptr};
}

// Set one flag of the session or of one of its members. `path`: the C++ member pointers that lead
// from the session to the flag.
template <auto... path>
void set_flag(Session& session, bool on) {
    const Locked lock;
    (session.*....*path) = on;  // follows the chain: session.*part.*flag
}

// Return `transcript` as the tuple that `recording` describes.
PyObject* words_of(const Transcript& transcript);

// The tables of the functions that the other files define.
PyMethodDef* held_methods();
PyMethodDef* optimizer_methods();
PyMethodDef* plan_methods();
PyMethodDef* profiler_methods();
PyMethodDef* snapshot_methods();
PyMethodDef* stats_methods();
PyMethodDef* step_methods();
PyMethodDef* storage_methods();
PyMethodDef* swap_methods();
PyMethodDef* transcript_methods();
PyMethodDef* test_methods();

}  // namespace rekindle
