// References to the storages of tensors, version counters, and functions on the bytes of a storage.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "placeholder.h"

namespace rekindle {

using StoragePtr = c10::intrusive_ptr<c10::StorageImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl>;

inline WeakStorage no_storage() {
    return WeakStorage(StoragePtr());
}

inline WeakTensor no_tensor() {
    return WeakTensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>());
}

// Return a weak reference to `tensor`, which is alive.
inline WeakTensor weak(const c10::TensorImpl& tensor) {
    return WeakTensor::reclaim_copy(const_cast<c10::TensorImpl*>(&tensor));
}

// Return a weak reference to `storage_impl`, which is alive.
inline WeakStorage weak(c10::StorageImpl& storage_impl) {
    return WeakStorage::reclaim_copy(&storage_impl);
}

// Return true if `one` and `other` are the same version counter. PyTorch cannot compare counters: a
// counter is one pointer, to the count that tensors share.
inline bool is_same_counter(
    const c10::VariableVersion& one, const c10::VariableVersion& other
) noexcept {
    static_assert(sizeof(one) == sizeof(void*));
    // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): no padding, as asserted
    return one.enabled() && std::memcmp(&one, &other, sizeof(one)) == 0;
}

// The version counter of a recorded value, and its count when the value was last known to be
// unmodified.
//
// NOTE [Version check]
//
// PyTorch compares version counters to find saved tensors that were modified in place. Saved-tensor
// hooks switch that check off, so the runtime repeats it (R7, version check). Scenario: `y =
// x.exp()`, then `y.add_(1)`, then `backward()` must raise PyTorch's error.
struct Version final {
    c10::VariableVersion counter{c10::VariableVersion::DISABLED};
    // version count of the unmodified value; negative if it is unknown or there is no counter
    std::int64_t expected = -1;

    static std::int64_t count_of(const c10::VariableVersion& counter) {
        return counter.enabled() ? static_cast<std::int64_t>(counter.current_version()) : -1;
    }

    std::int64_t now() const { return count_of(counter); }

    // Return true if the version counter changed since the last call of `look`, so the value was
    // written.
    bool moved() const { return expected >= 0 && counter.enabled() && now() != expected; }

    // Return true if the count has risen since the last call of `look`. The program may also set it
    // back (`torch.autograd._unsafe_preserve_version_counter`), which is no write.
    bool rose() const { return moved() && now() > expected; }

    // Record the current version count: the value counts as unmodified now.
    void look() { expected = now(); }
};

// Return the key of `storage_impl` in the table of storages; null if it has no memory. On the CPU
// the key is the address of the memory, which several storages may share. On a device, where frees
// are not reported, it is the address of the storage object, which stays unique while a weak
// reference exists. A placeholder has a key as well.
inline const void* address_of(const c10::StorageImpl& storage_impl) noexcept {
    const auto& data = const_cast<c10::StorageImpl&>(storage_impl)._mutable_data_ptr_no_checks();
    if (data.get() == nullptr) {
        return placeholder_id(data);
    }
    return data.device().is_cpu() ? data.get() : &storage_impl;
}

// Return an `at::Tensor` that refers to `tensor`, for functions that need one.
at::Tensor borrowed(const c10::TensorImpl& tensor);

// Return a counted reference to the storage of `tensor`, which must have one.
inline StoragePtr storage_of(const c10::TensorImpl& tensor) {
    return StoragePtr::reclaim_copy(tensor.unsafe_storage().unsafeGetStorageImpl());
}

// Return all bytes of `storage_impl` as a tensor that shares its memory.
at::Tensor whole_of(const StoragePtr& storage_impl);
// Allocate `nbytes` uninitialized bytes on `where`.
StoragePtr allocate_storage(std::size_t nbytes, c10::Device where);
// Return a new storage with a copy of the bytes of `storage_impl`.
StoragePtr copy_of(const StoragePtr& storage_impl);
// Return a checksum of all bytes of `storage_impl`.
std::uint64_t checksum_of(const c10::StorageImpl& storage_impl);
// Return true if `tensor` is a parameter of the program, or a view of one.
bool is_weight(const c10::TensorImpl& tensor);

}  // namespace rekindle
