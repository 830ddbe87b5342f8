#include "py_interrupts.h"

#include "../torch/raised.h"
#include "conversions.h"

namespace rekindle {

namespace {

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
        raise_object_later(type);
    }
    Py_DECREF(type);
    return interrupt ? Py_NewRef(Py_None) : PyObject_CallOneArg(hook, unraisable);
}

}  // namespace

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

}  // namespace rekindle
