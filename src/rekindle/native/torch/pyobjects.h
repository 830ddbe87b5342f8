// What Python has in the place of a tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

// As Python.h has it.
struct _object;

namespace rekindle {

// The types of plain tensors. Once.
void meet_types(_object* tensor, _object* parameter);
// Whether Python sees nothing but a `Tensor` or a `Parameter` in it.
bool is_plain_object(const c10::TensorImpl& tensor) noexcept;
// Whether Python sees a `Parameter` in it, or something derived from that.
bool is_parameter_object(const c10::TensorImpl& tensor) noexcept;
// Python's object for it; null: there is none.
const void* object_of(const c10::TensorImpl& tensor) noexcept;
// `tensor.detach()` as Python does it: a subclass stays one.
at::Tensor detached(const at::Tensor& tensor);
// Whether the program's own tensor has to come back, for there is more to it than its values: that
// of a leaf that needs no gradient. (Of others autograd knows the leaf.)
bool has_attributes(const c10::TensorImpl& tensor);

}  // namespace rekindle
