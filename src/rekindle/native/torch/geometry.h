// How tensors lie in their storages, and which have memory of which all is known.
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

// How a tensor lies in its storage.
struct Geometry final {
    c10::SmallVector<std::int64_t, 5> sizes;
    c10::SmallVector<std::int64_t, 5> strides;
    std::int64_t offset = 0;
    caffe2::TypeMeta dtype;
    c10::Device device{c10::DeviceType::CPU};
    bool conjugate = false;  // what is in memory is the conjugate
    bool negative = false;   // what is in memory has the other sign
    bool requires_grad = false;

    static Geometry of(const c10::TensorImpl& tensor);
    // The tensor of this geometry in `home`.
    at::Tensor in(const c10::intrusive_ptr<c10::StorageImpl>& home) const;
    std::int64_t numel() const noexcept;
    Bytes nbytes() const noexcept;
    // Bytes from the start of the storage to the end of the tensor.
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

// Whether it has memory on the CPU or on a device, though perhaps of a kind that cannot be rebuilt.
inline bool has_memory(
    const c10::TensorImpl& tensor, c10::DispatchKeySet keys = PLAIN_KEYS | QUANTIZED_KEYS
) noexcept {
    // The keys first of all: tensors of other kinds, as nested ones, throw when they are asked for
    // more. Those that are left are strided.
    return (tensor.key_set().raw_repr() & ~keys.raw_repr()) == 0 &&
           !tensor.has_symbolic_sizes_strides() &&
           tensor.unsafe_storage().unsafeGetStorageImpl() != nullptr &&
           (tensor.device_type() == c10::DeviceType::CPU || tensor.device_type() == ACCELERATOR);
}

// Whether that is plain, so that its geometry says all about it.
inline bool is_plain(const c10::TensorImpl& tensor) noexcept {
    const c10::ScalarType type = c10::typeMetaToScalarType(tensor.dtype());
    return has_memory(tensor, PLAIN_KEYS) && !c10::isQIntType(type) && !c10::isBitsType(type);
}

// Visits the tensors in what an operator returned, in order.
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
