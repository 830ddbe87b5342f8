// Geometry of a tensor: shape, strides, offset in its storage, dtype, device. Says which tensors
// can be rebuilt from a geometry and a storage.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <span>
#include <utility>

#include "../base/types.h"
#include "device.h"

namespace rekindle {

// Shape, strides, offset in the storage, dtype and device of a tensor.
struct Geometry final {
    c10::SmallVector<std::int64_t, 5> sizes;
    c10::SmallVector<std::int64_t, 5> strides;
    std::int64_t offset = 0;
    caffe2::TypeMeta dtype;
    c10::Device device{c10::DeviceType::CPU};
    bool conjugate = false;  // The memory holds the complex conjugates of the values.
    bool negative = false;   // The memory holds the negated values.
    bool requires_grad = false;

    static Geometry of(const c10::TensorImpl& tensor);
    // Make a tensor with this geometry in the memory of `storage_impl`.
    at::Tensor in(const c10::intrusive_ptr<c10::StorageImpl>& storage_impl) const;
    std::int64_t numel() const noexcept;
    Bytes nbytes() const noexcept;
    // Return true if the elements lie side by side in the order of the axes, from any offset.
    bool is_contiguous() const noexcept;
    // Return the bytes from the start of the storage to the end of the tensor's last element.
    Bytes reach() const noexcept;
};

inline constexpr c10::DispatchKeySet PLAIN_KEYS =
    c10::DispatchKeySet(c10::DispatchKey::CPU) |
    c10::DispatchKeySet(c10::DispatchKey::AutogradCPU) |
    c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView) |
    c10::DispatchKeySet(c10::DispatchKey::Conjugate) |
    c10::DispatchKeySet(c10::DispatchKey::Negative) |
    c10::DispatchKeySet(c10::DispatchKey::AutocastCPU) |
    c10::DispatchKeySet(c10::DispatchKey::CUDA) |
    c10::DispatchKeySet(c10::DispatchKey::AutogradCUDA) |
    c10::DispatchKeySet(c10::DispatchKey::AutocastCUDA);
inline constexpr c10::DispatchKeySet QUANTIZED_KEYS =
    c10::DispatchKeySet(c10::DispatchKey::QuantizedCPU) |
    c10::DispatchKeySet(c10::DispatchKey::QuantizedCUDA);

// Return true if the tensor has memory on the CPU or on an accelerator. The tensor may still be of
// a kind that cannot be rebuilt from its geometry.
inline bool has_memory(
    const c10::TensorImpl& tensor, c10::DispatchKeySet keys = PLAIN_KEYS | QUANTIZED_KEYS
) noexcept {
    // Check the dispatch keys first: tensors of other kinds, such as nested ones, throw when asked
    // for their strides. The kinds left after this check are strided.
    return (tensor.key_set().raw_repr() & ~keys.raw_repr()) == 0 &&
           !tensor.has_symbolic_sizes_strides() &&
           tensor.unsafe_storage().unsafeGetStorageImpl() != nullptr &&
           (tensor.device_type() == c10::DeviceType::CPU || tensor.device_type() == ACCELERATOR);
}

// Return true if the tensor can be rebuilt from its geometry and storage.
inline bool is_plain(const c10::TensorImpl& tensor) noexcept {
    const c10::ScalarType type = c10::typeMetaToScalarType(tensor.dtype());
    return has_memory(tensor, PLAIN_KEYS) && !c10::isQIntType(type) && !c10::isBitsType(type);
}

// Return a tensor with the memory, the geometry and the version counter of `tensor`, and without
// its autograd graph. Unlike for `detach()`, no dispatch mode sees that.
at::Tensor alias_of(const c10::TensorImpl& tensor);

// Call `visit(position, tensor)` for each tensor among the results of an operator, in order.
template <class F>
void each_tensor(std::span<const c10::IValue> results, F&& visit) {
    std::uint32_t position = 0;
    for (const c10::IValue& value : results) {
        if (value.isTensor()) {
            visit(position++, value.toTensor());
        } else if (value.isList()) {
            for (const c10::IValue& item : value.toListRef()) {
                if (item.isTensor()) {
                    visit(position++, item.toTensor());
                }
            }
        }
    }
}

}  // namespace rekindle
