#include "geometry.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/accumulate.h>

#include <optional>

#include "storage_ptr.h"

namespace rekindle {

Geometry Geometry::of(const c10::TensorImpl& tensor) {
    Geometry made;
    made.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
    made.strides.assign(tensor.strides().begin(), tensor.strides().end());
    made.offset = tensor.storage_offset();
    made.dtype = tensor.dtype();
    made.device = tensor.device();
    made.conjugate = tensor.is_conj();
    made.negative = tensor.is_neg();
    return made;
}

at::Tensor Geometry::in(const c10::intrusive_ptr<c10::StorageImpl>& storage_impl) const {
    const bool there = storage_impl->device_type() == ACCELERATOR;
    const c10::DispatchKeySet keys(there ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
    at::Tensor made =
        at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage_impl), keys, dtype);
    c10::TensorImpl& impl = *made.unsafeGetTensorImpl();
    impl.set_sizes_and_strides(sizes, strides, offset);
    if (conjugate) {
        impl._set_conj(true);
    }
    if (negative) {
        impl._set_neg(true);
    }
    if (requires_grad) {
        impl.set_requires_grad(true);
    }
    return made;
}

at::Tensor alias_of(const c10::TensorImpl& tensor) {
    if (!is_plain(tensor)) {
        return at::Tensor(tensor.shallow_copy_and_detach(tensor.version_counter(), true));
    }
    // a tensor made in inference mode would have no version counter
    std::optional<c10::InferenceMode> outside;
    if (c10::InferenceMode::is_enabled()) {
        outside.emplace(false);
    }
    at::Tensor made = Geometry::of(tensor).in(
        StoragePtr::reclaim_copy(tensor.unsafe_storage().unsafeGetStorageImpl())
    );
    if (tensor.version_counter().enabled()) {
        made.unsafeGetTensorImpl()->set_version_counter(tensor.version_counter());
    }
    return made;
}

std::int64_t Geometry::numel() const noexcept {
    return c10::multiply_integers(sizes);
}

Bytes Geometry::nbytes() const noexcept {
    return numel() * static_cast<Bytes>(dtype.itemsize());
}

bool Geometry::is_contiguous() const noexcept {
    std::int64_t stride = 1;
    for (std::size_t i = sizes.size(); i-- > 0;) {
        if (sizes[i] != 1 && strides[i] != stride) {
            return false;
        }
        stride *= sizes[i];
    }
    return true;
}

Bytes Geometry::reach() const noexcept {
    std::int64_t last = offset;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        if (sizes[i] == 0) {
            return 0;
        }
        last += (sizes[i] - 1) * strides[i];
    }
    return (last + 1) * static_cast<Bytes>(dtype.itemsize());
}

}  // namespace rekindle
