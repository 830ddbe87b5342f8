#include "sizes.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index.h>
#include <ATen/ops/max.h>
#include <ATen/ops/sum.h>
#include <c10/util/SmallVector.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <vector>

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

std::int64_t broadcast_elements(std::span<const Geometry> geometries) {
    c10::SmallVector<std::int64_t, 8> most;  // the last dimension first
    for (const Geometry& geometry : geometries) {
        const std::size_t n = geometry.sizes.size();
        most.resize(std::max(most.size(), n), 1);
        for (std::size_t i = 0; i < n; ++i) {
            const std::int64_t size = geometry.sizes[n - 1 - i];
            most[i] = most[i] == 1 ? size : std::max(most[i], size);
        }
    }
    return c10::multiply_integers(most);
}

namespace {

// Most bytes of an element of a result, unless an argument has larger elements.
constexpr Bytes ELEMENT = 8;
// Most results of an operator that works element by element.
constexpr Bytes MOST_RESULTS = 2;

// Return the number of elements of a product of matrices, whose last two arguments are the factors;
// -1 for other operators.
std::int64_t product_elements(const Signature& signature) {
    const std::string_view name = signature.facts.name;
    const bool adds = name == "aten::addmm" || name == "aten::baddbmm";
    const bool multiplies = name == "aten::mm" || name == "aten::bmm";
    const std::vector<Geometry>& geometries = signature.geometries;
    if ((!adds && !multiplies) || geometries.size() != (adds ? 3U : 2U)) {
        return -1;
    }
    const Geometry& left = geometries[geometries.size() - 2];
    const Geometry& right = geometries.back();
    if (left.sizes.size() < 2 || right.sizes.size() < 2 || left.sizes.back() == 0) {
        return -1;
    }
    return left.numel() / left.sizes.back() * right.sizes.back();
}

// Return the number of elements of a convolution's result; -1 for a transposed one.
std::int64_t convolution_elements(
    std::span<const Geometry> geometries, std::span<const c10::IValue> given
) {
    if (given.size() < 7 || !given[3].isIntList() || !given[4].isIntList() ||
        !given[5].isIntList() || given[6].toBool() || geometries.size() < 2 ||
        geometries[0].sizes.size() != geometries[1].sizes.size()) {
        return -1;
    }
    const auto stride = given[3].toIntVector();
    const auto padding = given[4].toIntVector();
    const auto dilation = given[5].toIntVector();
    const auto& input = geometries[0].sizes;
    const auto& weight = geometries[1].sizes;
    const std::size_t n = input.size() < 2 ? 0 : input.size() - 2;
    if (n == 0 || stride.size() != n || padding.size() != n || dilation.size() != n) {
        return -1;
    }
    std::int64_t elements = input[0] * weight[0];
    for (std::size_t i = 0; i < n; ++i) {
        const std::int64_t reach = dilation[i] * (weight[i + 2] - 1) + 1;
        const std::int64_t room = input[i + 2] + 2 * padding[i] - reach;
        elements *= room < 0 ? 0 : room / std::max<std::int64_t>(1, stride[i]) + 1;
    }
    return elements;
}

}  // namespace

Bytes most_bytes(const Signature& signature, std::span<const c10::IValue> given) {
    const Facts& facts = signature.facts;
    const std::span<const Geometry> geometries(signature.geometries);
    const bool lists = std::ranges::any_of(given, &c10::IValue::isTensorList);
    if (geometries.empty() || facts.dynamic) {
        return -1;
    }
    Bytes all = 0;
    Bytes element = ELEMENT;
    for (const Geometry& geometry : geometries) {
        if (geometry.numel() == 0) {
            return -1;  // for example, the sum of no rows has elements
        }
        all += geometry.nbytes();
        element = std::max(element, static_cast<Bytes>(geometry.dtype.itemsize()));
    }
    if (signature.op.hasTag(at::Tag::pointwise) && !lists) {
        return MOST_RESULTS * element * broadcast_elements(geometries);
    }
    if (facts.has(Traits::LIKE_ARGUMENTS) &&
        c10::isFloatingType(c10::typeMetaToScalarType(geometries[0].dtype))) {
        return 4 * all;
    }
    const std::int64_t elements = facts.name == "aten::convolution"
                                      ? convolution_elements(geometries, given)
                                      : product_elements(signature);
    return elements < 0 ? -1 : element * elements;
}

}  // namespace rekindle
