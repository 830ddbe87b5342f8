// Tensors that have no memory of their own are made of others that have: the indices and the values
// of a sparse one, the buffer of a nested one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <span>

#include "../base/types.h"
#include "geometry.h"

namespace rekindle {

using Parts = c10::SmallVector<at::Tensor, 3>;

// Those with memory; none where nobody knows.
Parts parts_of(const at::Tensor& tensor);

// Bytes of the largest nested tensor among `given`, were it padded: it has no shape.
Bytes largest_padded(std::span<const c10::IValue> given);

// Visits the tensors with memory in what an operator returned, with the position of the result and
// whether they are all of it; what is visited may go afterwards.
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
