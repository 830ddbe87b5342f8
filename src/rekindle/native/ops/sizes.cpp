#include "sizes.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index.h>
#include <ATen/ops/max.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <limits>
#include <string_view>

#include "../torch/replay_dispatch_guard.h"

namespace rekindle {

namespace {

Bytes count_of(const at::Tensor& tensor) {
    return at::count_nonzero(tensor).item<std::int64_t>();
}

bool is_mask(const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
}

at::Tensor on_meta(c10::IntArrayRef sizes, c10::ScalarType dtype) {
    return at::empty(sizes, at::TensorOptions().dtype(dtype).device(c10::DeviceType::Meta));
}

// Return the bytes of `tensor[indices]`. A boolean mask counts as one index tensor per dimension.
Bytes bytes_of_index(const at::Tensor& tensor, c10::ArrayRef<c10::IValue> indices) {
    bool masked = false;
    c10::List<std::optional<at::Tensor>> const places;
    for (const c10::IValue& each : indices) {
        if (!each.isTensor() || !each.toTensor().defined()) {
            places.push_back(std::nullopt);
        } else if (const at::Tensor& index = each.toTensor(); is_mask(index)) {
            masked = true;
            const at::Tensor found = on_meta({count_of(index)}, at::kLong);
            for (std::int64_t i = 0; i < index.dim(); ++i) {
                places.push_back(std::optional(found));
            }
        } else {
            places.push_back(std::optional(on_meta(index.sizes(), at::kLong)));
        }
    }
    if (!masked) {
        return UNLIMITED;  // Without a mask, the meta kernel of `index` predicts the size.
    }
    const at::Tensor made = at::index(on_meta(tensor.sizes(), tensor.scalar_type()), places);
    return static_cast<Bytes>(made.storage().nbytes());
}

}  // namespace

Need bytes_of_dynamic(const Facts& facts, std::span<const c10::IValue> given) {
    if (given.empty() || !given[0].isTensor() || !given[0].toTensor().defined()) {
        return {UNLIMITED, false};
    }
    const ReplayDispatchGuard guard(false);
    const std::string_view name = facts.name;
    const at::Tensor& tensor = given[0].toTensor();
    const auto itemsize = static_cast<Bytes>(tensor.element_size());
    const std::size_t n = given.size();
    if (name == "aten::nonzero") {
        return {8 * tensor.dim() * count_of(tensor), true};
    }
    if (name == "aten::masked_select" && n > 1) {
        const at::Tensor& mask = given[1].toTensor();
        const at::Tensor whole = mask.expand(at::infer_size(tensor.sizes(), mask.sizes()));
        return {itemsize * count_of(whole), true};
    }
    if (name == "aten::repeat_interleave" && (n < 2 || !given[1].isTensor())) {
        return {itemsize * at::sum(tensor).item<std::int64_t>(), true};
    }
    if (name == "aten::bincount" && tensor.numel() != 0) {
        const std::int64_t least = n > 2 && given[2].isInt() ? given[2].toInt() : 0;
        return {8 * std::max(at::max(tensor).item<std::int64_t>() + 1, least), true};
    }
    // Return an upper bound: the size of the results if all elements differ.
    if (name == "aten::_unique2" && n > 3) {
        const Bytes more = (given[2].toBool() ? 1 : 0) + (given[3].toBool() ? 1 : 0);
        return {tensor.numel() * (itemsize + 8 * more), false};
    }
    if (name == "aten::index" && n > 1) {
        const Bytes found = bytes_of_index(tensor, given[1].toListRef());
        return {found, found != UNLIMITED};
    }
    return {UNLIMITED, false};
}

}  // namespace rekindle
