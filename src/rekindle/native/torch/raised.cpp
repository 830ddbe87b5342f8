#define PY_SSIZE_T_CLEAN
#include "raised.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <string>

#include "gil.h"

namespace rekindle {

namespace {

struct OutOfMemory final {
    PyObject* full = nullptr;
    PyObject* not_full = nullptr;
};

OutOfMemory& out_of_memory() noexcept {
    static OutOfMemory made;
    return made;
}

// Type and value of a Python error that passed through C++ by PyTorch's bindings, or by pybind11
// (from kernels written in Python). Null if the error is not from Python.
struct Raised final {
    PyObject* type = nullptr;
    PyObject* value = nullptr;
};

Raised raised_by_python(const std::exception& error) noexcept {
    if (const auto* torchs = dynamic_cast<const python_error*>(&error)) {
        return {torchs->type, torchs->value};
    }
    if (const auto* others = dynamic_cast<const pybind11::error_already_set*>(&error)) {
        return {others->type().ptr(), others->value().ptr()};
    }
    return {};
}

// If the C++ exception `error` comes from Python, call `ask` with its Python type and value while
// holding the GIL, and return the result.
template <class F>
bool ask_python(const std::exception& error, F&& ask) noexcept {
    if (Py_IsInitialized() == 0) {
        return false;
    }
    const Gil gil;
    const Raised raised = raised_by_python(error);
    return raised.type != nullptr && std::forward<F>(ask)(raised);
}

int raise_now(void* object) {
    auto* error = static_cast<PyObject*>(object);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
    Py_DECREF(error);
    return -1;
}

}  // namespace

void raise_object_later(PyObject* error) noexcept {
    const bool whole = PyExceptionInstance_Check(error) != 0;
    PyObject* made = whole ? Py_NewRef(error) : PyObject_CallNoArgs(error);
    if (made == nullptr || Py_AddPendingCall(&raise_now, made) != 0) {
        PyErr_Clear();
        PyErr_SetInterrupt();  // Unlike Py_AddPendingCall(), this function cannot fail.
    }
}

void set_out_of_memory_types(PyObject* full, PyObject* not_full) {
    Py_INCREF(full);  // Keep the exception types forever.
    Py_INCREF(not_full);
    out_of_memory() = {full, not_full};
}

bool is_out_of_memory(const std::exception& error) {
    return ask_python(error, [](const Raised& raised) {
        return PyErr_GivenExceptionMatches(raised.type, out_of_memory().full) != 0 &&
               PyErr_GivenExceptionMatches(raised.type, out_of_memory().not_full) == 0;
    });
}

bool ends_the_program(const std::exception& error) noexcept {
    return ask_python(error, [](const Raised& raised) {
        return PyErr_GivenExceptionMatches(raised.type, PyExc_Exception) == 0;
    });
}

void raise_later(const std::exception& error) noexcept {
    ask_python(error, [](const Raised& raised) {
        raise_object_later(raised.value == nullptr ? raised.type : raised.value);
        return true;
    });
}

void add_note(std::exception& first, const std::exception& second) noexcept {
    if (ends_the_program(second)) {
        raise_later(second);
        return;
    }
    const std::string note = std::string("And then: ") + second.what();
    if (auto* torchs = dynamic_cast<c10::Error*>(&first)) {
        torchs->add_context(note);
        return;
    }
    ask_python(first, [&](const Raised& raised) {
        PyObject* done = PyObject_CallMethod(raised.value, "add_note", "s", note.c_str());
        if (done == nullptr) {
            PyErr_Clear();  // No Python code ran, so no interrupt is lost.
        }
        Py_XDECREF(done);
        return true;
    });
}

void set_error() noexcept {
    try {
        throw;
    } catch (python_error& error) {
        error.restore();
    } catch (pybind11::error_already_set& error) {
        error.restore();
    } catch (const c10::TypeError& error) {
        PyErr_SetString(PyExc_TypeError, error.what_without_backtrace());
    } catch (const c10::Error& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (...) {
        PyErr_SetString(PyExc_RuntimeError, "the native core failed; please report this");
    }
}

}  // namespace rekindle
