// Component tensors of tensors that have no memory of their own: indices and values of a sparse
// tensor, the buffer of a nested tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <span>

#include "../base/types.h"
#include "geometry.h"

namespace rekindle {

using Parts = c10::SmallVector<at::Tensor, 3>;

// Return the components that have memory; none for unknown kinds.
Parts parts_of(const at::Tensor& tensor);

// Return the bytes of the largest nested tensor among `given` after padding. Nested tensors have no
// shape that would say so.
Bytes largest_padded(std::span<const c10::IValue> given);

// Call `visit(position, tensor, whole)` for each tensor with memory in the results of an operator.
// `whole` is false for a component of the result. The visitor may release the tensor.
template <class F>
void each_memory(std::span<const c10::IValue> results, F&& visit) {
    each_tensor(results, [&](std::uint32_t position, const at::Tensor& tensor) {
        if (!tensor.defined()) {
            return;
        }
        if (has_memory(*tensor.unsafeGetTensorImpl())) {
            visit(position, tensor, true);
            return;
        }
        for (const at::Tensor& part : parts_of(tensor)) {
            visit(position, part, false);
        }
    });
}

}  // namespace rekindle
