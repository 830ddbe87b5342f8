#include "parts.h"

#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/prod.h>

#include <algorithm>

#include "replay_dispatch_guard.h"

namespace rekindle {

Parts parts_of(const at::Tensor& tensor) {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    const c10::DispatchKeySet keys = impl.key_set();
    Parts made;
    const auto add = [&](const at::Tensor& part) {
        if (part.defined() && has_memory(*part.unsafeGetTensorImpl())) {
            made.push_back(part);
        }
    };
    if (keys.has(c10::DispatchKey::Python)) {
        return made;  // A subclass may report any layout, so nothing is known of its components.
    }
    if (keys.has(c10::DispatchKey::Sparse)) {
        const auto& sparse = static_cast<const at::SparseTensorImpl&>(impl);
        add(sparse.indices());
        add(sparse.values());
    } else if (keys.has(c10::DispatchKey::SparseCsr)) {
        const auto& compressed = static_cast<const at::SparseCsrTensorImpl&>(impl);
        add(compressed.compressed_indices());
        add(compressed.plain_indices());
        add(compressed.values());
    } else if (keys.has(c10::DispatchKey::NestedTensor)) {
        add(static_cast<const at::native::NestedTensorImpl&>(impl).get_unsafe_storage_as_tensor());
    }
    return made;
}

Bytes largest_padded(std::span<const c10::IValue> given) {
    const ReplayDispatchGuard guard(false);
    Bytes most = 0;
    for (const c10::IValue& value : given) {
        if (!value.isTensor() || !value.toTensor().key_set().has(c10::DispatchKey::NestedTensor)) {
            continue;
        }
        const auto& nested = static_cast<const at::native::NestedTensorImpl&>(
            *value.toTensor().unsafeGetTensorImpl()
        );
        const at::Tensor& sizes = nested.get_nested_sizes();
        if (sizes.numel() != 0) {
            const auto count = at::amax(sizes, {0}).prod().item<std::int64_t>() * sizes.size(0);
            most = std::max(most, count * static_cast<Bytes>(nested.itemsize()));
        }
    }
    return most;
}

}  // namespace rekindle
