#include "storage_ptr.h"

#include <ATen/ops/clone.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "geometry.h"
#include "pyobjects.h"
#include "replay_dispatch_guard.h"

namespace rekindle {

at::Tensor borrowed(const c10::TensorImpl& tensor) {
    return at::Tensor(
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
            const_cast<c10::TensorImpl*>(&tensor)
        )
    );
}

at::Tensor whole_of(const StoragePtr& storage_impl) {
    Geometry geometry;
    geometry.sizes.push_back(static_cast<std::int64_t>(storage_impl->nbytes()));
    geometry.strides.push_back(1);
    geometry.dtype = caffe2::TypeMeta::Make<std::uint8_t>();
    return geometry.in(storage_impl);
}

StoragePtr allocate_storage(std::size_t nbytes, c10::Device where) {
    const c10::DeviceGuard guard(where);
    c10::Allocator* allocator = c10::GetAllocator(where.type());
    return c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), nbytes, allocator->allocate(nbytes), allocator, true
    );
}

StoragePtr copy_of(const StoragePtr& storage_impl) {
    const std::size_t nbytes = storage_impl->nbytes();
    if (storage_impl->device_type() != c10::DeviceType::CPU) {
        const ReplayDispatchGuard guard(false);
        const at::Tensor made = at::clone(whole_of(storage_impl));
        return StoragePtr::reclaim_copy(made.storage().unsafeGetStorageImpl());
    }
    StoragePtr made = allocate_storage(nbytes, c10::kCPU);
    std::memcpy(made->mutable_data(), storage_impl->data(), nbytes);
    return made;
}

std::uint64_t checksum_of(const c10::StorageImpl& storage_impl) {
    const auto* bytes = static_cast<const char*>(storage_impl.data());
    // Compute four independent sums, so that the processor overlaps them.
    std::array<std::uint64_t, 4> sums{1, 2, 3, 4};
    std::size_t left = storage_impl.nbytes();
    while (left != 0) {
        for (std::uint64_t& sum : sums) {
            std::uint64_t word = 0;
            const std::size_t length = std::min(left, sizeof(word));
            std::memcpy(&word, bytes, length);
            sum = (std::rotl(sum, 23) ^ word) * 0x9E3779B97F4A7C15ULL;
            bytes += length;
            left -= length;
        }
    }
    return sums[0] ^ std::rotl(sums[1], 16) ^ std::rotl(sums[2], 32) ^ std::rotl(sums[3], 48);
}

bool is_weight(const c10::TensorImpl& tensor) {
    const at::Tensor alias = borrowed(tensor);
    const auto* view = torch::autograd::impl::get_view_autograd_meta(alias);
    const at::Tensor& whole =
        view != nullptr && view->has_bw_view() ? view->get_backward_view().base_ : alias;
    return (whole.requires_grad() && whole.is_leaf()) ||
           is_parameter_object(*whole.unsafeGetTensorImpl());
}

}  // namespace rekindle
