// The memory of tensors: storages by counted references, and what is asked of their bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>

#include "husk.h"

namespace rekindle {

using Home = c10::intrusive_ptr<c10::StorageImpl>;
using WeakHome = c10::weak_intrusive_ptr<c10::StorageImpl>;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl>;

inline WeakHome no_home() {
    return WeakHome(Home());
}

inline WeakTensor no_tensor() {
    return WeakTensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>());
}

inline WeakTensor weak(const c10::TensorImpl& tensor) {
    return WeakTensor(
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
            const_cast<c10::TensorImpl*>(&tensor)
        )
    );
}

// A version counter, and what it said when a value was known to be there (R7).
struct Version final {
    c10::VariableVersion counter{c10::VariableVersion::DISABLED};
    std::int64_t expected = -1;  // negative: not known, or there is no counter

    static std::int64_t told_by(const c10::VariableVersion& counter) {
        return counter.enabled() ? static_cast<std::int64_t>(counter.current_version()) : -1;
    }

    std::int64_t now() const { return told_by(counter); }

    bool moved() const { return expected >= 0 && counter.enabled() && now() != expected; }

    void look() { expected = now(); }
};

// By which the table knows the memory in `home`; null: there is none. On the CPU that of the memory
// itself, which several storages may share; on a device, where nobody tells when memory goes, that
// of the storage, which nothing else can have while somebody refers to it weakly. A husk has an
// address as well.
inline const void* address_of(const c10::StorageImpl& home) noexcept {
    const auto& data = const_cast<c10::StorageImpl&>(home)._mutable_data_ptr_no_checks();
    if (data.get() == nullptr) {
        return token_of(data);
    }
    return data.device().is_cpu() ? data.get() : &home;
}

// `tensor`, for functions that ask for a reference of their own.
at::Tensor borrowed(const c10::TensorImpl& tensor);
// The bytes of `home` as a tensor.
at::Tensor whole_of(const Home& home);
// So many bytes of `where`, of which nobody knows what they are.
Home new_home(std::size_t nbytes, c10::Device where);
// The same bytes in memory of its own.
Home copy_of(const Home& home);
// Of all bytes.
std::uint64_t checksum_of(const c10::StorageImpl& home);
// Whether a tensor is a parameter of the program, or a view of one.
bool is_weight(const c10::TensorImpl& tensor);

}  // namespace rekindle
