// Component tensors of a tensor without memory of its own: indices and values of a sparse tensor,
// the buffer of a nested tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <span>

#include "../base/types.h"
#include "geometry.h"

namespace rekindle {

using Parts = c10::SmallVector<at::Tensor, 3>;

// Return the components of `tensor` that have memory; none for unknown kinds of tensors.
Parts parts_of(const at::Tensor& tensor);

// Return the bytes of the largest nested tensor among `given` after padding. They do not follow
// from a shape, because a nested tensor has none.
Bytes largest_padded(std::span<const c10::IValue> given);

// Call `visit(position, tensor, whole)` for each tensor with memory among the results of an
// operator. `whole` is false if `tensor` is a component of a result. The visitor may release the
// tensor.
template <class F>
void each_memory(std::span<const c10::IValue> results, F&& visit) {
    each_tensor(results, [&](std::uint32_t position, const at::Tensor& tensor) {
        if (!tensor.defined()) [[unlikely]] {
            return;
        }
        if (has_memory(*tensor.unsafeGetTensorImpl())) [[likely]] {
            visit(position, tensor, true);
            return;
        }
        for (const at::Tensor& part : parts_of(tensor)) {
            visit(position, part, false);
        }
    });
}

}  // namespace rekindle
