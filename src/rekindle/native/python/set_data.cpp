#include "set_data.h"

#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "../memory/session.h"
#include "../torch/geometry.h"
#include "../torch/storage_ptr.h"
#include "conversions.h"

namespace rekindle {

namespace {

setter set_data_of_torch = nullptr;
PyObject* watcher_of_data = nullptr;  // guarded by the GIL

// Return the storage of `object`; null if it is no tensor with memory.
StoragePtr storage_in(PyObject* object) {
    if (!THPVariable_Check(object)) {
        return {};
    }
    const c10::TensorImpl& tensor = *THPVariable_Unpack(object).unsafeGetTensorImpl();
    return has_memory(tensor) ? storage_of(tensor) : StoragePtr();
}

int set_data(PyObject* object, PyObject* value, void* closure) {
    if (watcher_of_data != nullptr) {
        PyObject* watcher = Py_NewRef(watcher_of_data);  // the call may replace it
        PyObject* done = PyObject_CallOneArg(watcher, object);
        Py_DECREF(watcher);
        if (done == nullptr) {
            return -1;
        }
        Py_DECREF(done);
    }
    if (!any_sessions()) [[likely]] {
        return set_data_of_torch(object, value, closure);
    }
    const StoragePtr before = storage_in(object);
    const int result = set_data_of_torch(object, value, closure);
    if (result == 0 && before && storage_in(object) != before) {
        tensor_moved(*THPVariable_Unpack(object).unsafeGetTensorImpl(), *before);
    }
    return result;
}

}  // namespace

// PyTorch defines the attribute in a table of getters and setters, to which the descriptor refers.
// So all subclasses see the change, and reading the attribute costs nothing more.
void see_set_data(PyObject* tensor_type) {
    const Object found(PyObject_GetAttrString(tensor_type, "data"));
    if (Py_TYPE(found.get()) != &PyGetSetDescr_Type) {
        return;  // the program has replaced the attribute
    }
    PyGetSetDef& table = *reinterpret_cast<PyGetSetDescrObject*>(found.get())->d_getset;
    set_data_of_torch = table.set;
    table.set = &set_data;
}

void watch_set_data(PyObject* watcher) {
    Py_XDECREF(std::exchange(watcher_of_data, watcher == Py_None ? nullptr : Py_NewRef(watcher)));
}

}  // namespace rekindle
