#define PY_SSIZE_T_CLEAN
#include "pyobjects.h"

#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include "gil.h"

namespace rekindle {

namespace {

struct Types final {
    PyTypeObject* tensor = nullptr;
    PyTypeObject* parameter = nullptr;
};

Types& types() noexcept {
    static Types made;
    return made;
}

}  // namespace

void set_tensor_types(PyObject* tensor, PyObject* parameter) {
    Py_INCREF(tensor);  // Never released, because sessions outlive Python modules.
    Py_INCREF(parameter);
    types().tensor = reinterpret_cast<PyTypeObject*>(tensor);
    types().parameter = reinterpret_cast<PyTypeObject*>(parameter);
}

void call_soon(int (*function)(void*)) noexcept {
    static_cast<void>(Py_AddPendingCall(function, nullptr));
}

bool is_plain_object(const c10::TensorImpl& tensor) noexcept {
    const PyObject* object = tensor.pyobj_slot()->load_pyobj();
    if (object == nullptr) {
        return true;
    }
    const PyTypeObject* type = Py_TYPE(object);
    return type == types().tensor || type == types().parameter;
}

bool is_parameter_object(const c10::TensorImpl& tensor) noexcept {
    const PyObject* object = tensor.pyobj_slot()->load_pyobj();
    return object != nullptr && PyType_IsSubtype(Py_TYPE(object), types().parameter) != 0;
}

const void* object_of(const c10::TensorImpl& tensor) noexcept {
    return tensor.pyobj_slot()->load_pyobj();
}

bool is_named(const c10::TensorImpl& tensor) noexcept {
    const c10::impl::PyObjectSlot& python = *tensor.pyobj_slot();
    return python.load_pyobj() != nullptr && !python.has_unique_reference();
}

bool is_named(const c10::StorageImpl& storage_impl) noexcept {
    const c10::impl::PyObjectSlot& python = *storage_impl.pyobj_slot();
    return python.load_pyobj() != nullptr && !python.has_unique_reference();
}

bool has_attributes(const c10::TensorImpl& tensor) {
    PyObject* object = tensor.pyobj_slot()->load_pyobj();
    if (object == nullptr) {
        return false;
    }
    if (Py_TYPE(object) != types().tensor) {
        return true;
    }
    const Gil gil;
    PyObject* attributes = PyObject_GenericGetDict(object, nullptr);
    if (attributes == nullptr) {
        // The tensor object has no attributes. No Python code ran, so no other error is lost.
        PyErr_Clear();
        return false;
    }
    const bool any = PyDict_GET_SIZE(attributes) != 0;
    Py_DECREF(attributes);
    return any;
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

}  // namespace rekindle
