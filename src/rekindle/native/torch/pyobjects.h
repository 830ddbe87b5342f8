// Functions about the Python object of a tensor: its type, its attributes. And a call of Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

// Forward declaration of PyObject as in Python.h.
struct _object;

namespace rekindle {

// Set the Python types `torch.Tensor` and `torch.nn.Parameter`. Called once.
void set_tensor_types(_object* tensor, _object* parameter);
// Let Python call `function(nullptr)` in the main thread soon: at the latest when the call of a C
// function returns to it. If too many such calls wait already, do nothing.
void call_soon(int (*function)(void*)) noexcept;
// Return true if the tensor's Python type is exactly `Tensor` or `Parameter`.
bool is_plain_object(const c10::TensorImpl& tensor) noexcept;
// Return true if the tensor's Python type is `Parameter` or a subclass of it.
bool is_parameter_object(const c10::TensorImpl& tensor) noexcept;
// Return the Python object of the tensor; null if there is none.
const void* object_of(const c10::TensorImpl& tensor) noexcept;
// Return true if Python code refers to the tensor's Python object, not only the tensor itself.
bool is_named(const c10::TensorImpl& tensor) noexcept;
// Return true if Python code refers to the Python object of the storage `storage_impl`.
bool is_named(const c10::StorageImpl& storage_impl) noexcept;
// Return `tensor.detach()`, called through Python, so that a tensor subclass is kept.
at::Tensor detached(const at::Tensor& tensor);
// Return true if unpacking a saved tensor must return the program's own tensor object, because it
// has Python attributes. Relevant for leaves that need no gradient; for other leaves autograd keeps
// the object.
bool has_attributes(const c10::TensorImpl& tensor);

}  // namespace rekindle
