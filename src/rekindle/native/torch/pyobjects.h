// Questions about the Python object of a tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

// Forward declaration of PyObject as in Python.h.
struct _object;

namespace rekindle {

// Set the types of plain tensors and parameters. Called once.
void set_tensor_types(_object* tensor, _object* parameter);
// Return true if Python sees the tensor as exactly `Tensor` or `Parameter`.
bool is_plain_object(const c10::TensorImpl& tensor) noexcept;
// Return true if Python sees the tensor as a `Parameter` or a subclass of it.
bool is_parameter_object(const c10::TensorImpl& tensor) noexcept;
// Return the Python object of the tensor; null if there is none.
const void* object_of(const c10::TensorImpl& tensor) noexcept;
// Return `tensor.detach()` as Python computes it, so that a subclass is kept.
at::Tensor detached(const at::Tensor& tensor);
// Return true if unpacking must return the program's own tensor object, because it has attributes
// beyond its values. Relevant for leaves that need no gradient; for others autograd knows the leaf.
bool has_attributes(const c10::TensorImpl& tensor);

}  // namespace rekindle
