#include "meta_kernels.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/native/TypeProperties.h>
#include <ATen/ops/_log_softmax_backward_data_meta_dispatch.h>
#include <ATen/ops/_log_softmax_meta_dispatch.h>
#include <ATen/ops/_softmax_backward_data_meta_dispatch.h>
#include <ATen/ops/_softmax_meta_dispatch.h>
#include <ATen/ops/add_meta_dispatch.h>
#include <ATen/ops/addcdiv_meta_dispatch.h>
#include <ATen/ops/addcmul_meta_dispatch.h>
#include <ATen/ops/addmm_meta_dispatch.h>
#include <ATen/ops/baddbmm_meta_dispatch.h>
#include <ATen/ops/bmm_meta_dispatch.h>
#include <ATen/ops/cat_meta_dispatch.h>
#include <ATen/ops/cos_meta_dispatch.h>
#include <ATen/ops/div_meta_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like_native.h>
#include <ATen/ops/exp_meta_dispatch.h>
#include <ATen/ops/gelu_backward_meta_dispatch.h>
#include <ATen/ops/gelu_meta_dispatch.h>
#include <ATen/ops/leaky_relu_meta_dispatch.h>
#include <ATen/ops/log_meta_dispatch.h>
#include <ATen/ops/maximum_meta_dispatch.h>
#include <ATen/ops/mean_meta_dispatch.h>
#include <ATen/ops/mm_meta_dispatch.h>
#include <ATen/ops/mse_loss_meta_dispatch.h>
#include <ATen/ops/mul_meta_dispatch.h>
#include <ATen/ops/neg_meta_dispatch.h>
#include <ATen/ops/nll_loss_backward_meta_dispatch.h>
#include <ATen/ops/nll_loss_forward_meta_dispatch.h>
#include <ATen/ops/pow_meta_dispatch.h>
#include <ATen/ops/rsqrt_meta_dispatch.h>
#include <ATen/ops/sigmoid_backward_meta_dispatch.h>
#include <ATen/ops/sigmoid_meta_dispatch.h>
#include <ATen/ops/silu_backward_meta_dispatch.h>
#include <ATen/ops/silu_meta_dispatch.h>
#include <ATen/ops/sin_meta_dispatch.h>
#include <ATen/ops/sqrt_meta_dispatch.h>
#include <ATen/ops/sub_meta_dispatch.h>
#include <ATen/ops/sum_meta_dispatch.h>
#include <ATen/ops/tanh_backward_meta_dispatch.h>
#include <ATen/ops/tanh_meta_dispatch.h>
#include <ATen/ops/threshold_backward_meta_dispatch.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>

#include "../base/slab.h"

namespace rekindle {

namespace {

using Table = std::unordered_map<std::string, c10::KernelFunction>;

template <class F>
Table::value_type row(const char* name, F* kernel) {
    return {name, c10::KernelFunction::makeFromUnboxedRuntimeFunction(kernel)};
}

at::Tensor embedding(
    const at::Tensor& weight,
    const at::Tensor& indices,
    std::int64_t /*padding*/,
    bool /*scaled*/,
    bool /*sparse*/
) {
    c10::SmallVector<std::int64_t, 6> sizes(indices.sizes());
    sizes.push_back(weight.size(1));
    return at::empty(sizes, weight.options());
}

at::Tensor embedding_dense_backward(
    const at::Tensor& gradient,
    const at::Tensor& /*indices*/,
    std::int64_t rows,
    std::int64_t /*padding*/,
    bool /*scaled*/
) {
    return at::empty({rows, gradient.size(-1)}, gradient.options());
}

at::Tensor stack(at::TensorList tensors, std::int64_t dim) {
    const auto n = static_cast<std::int64_t>(tensors.size());
    c10::SmallVector<std::int64_t, 6> sizes(tensors.front().sizes());
    const std::int64_t place = c10::maybe_wrap_dim(dim, tensors.front().dim() + 1);
    sizes.insert(sizes.begin() + place, n);
    return at::empty(sizes, tensors.front().options().dtype(at::native::result_type(tensors)));
}

Table make_table() {
    return {
        row("aten::tanh", &at::meta::tanh),
        row("aten::sigmoid", &at::meta::sigmoid),
        row("aten::exp", &at::meta::exp),
        row("aten::log", &at::meta::log),
        row("aten::sqrt", &at::meta::sqrt),
        row("aten::rsqrt", &at::meta::rsqrt),
        row("aten::neg", &at::meta::neg),
        row("aten::sin", &at::meta::sin),
        row("aten::cos", &at::meta::cos),
        row("aten::add.Tensor", &at::meta::add),
        row("aten::sub.Tensor", &at::meta::sub),
        row("aten::mul.Tensor", &at::meta::mul),
        row<at::Tensor(const at::Tensor&, const at::Tensor&)>("aten::div.Tensor", &at::meta::div),
        row<at::Tensor(const at::Tensor&, const at::Scalar&)>(
            "aten::pow.Tensor_Scalar", &at::meta::pow
        ),
        row("aten::silu", &at::meta::silu),
        row("aten::gelu", &at::meta::gelu),
        row("aten::leaky_relu", &at::meta::leaky_relu),
        row("aten::addcmul", &at::meta::addcmul),
        row("aten::addcdiv", &at::meta::addcdiv),
        row("aten::maximum", &at::meta::maximum),
        row("aten::tanh_backward", &at::meta::tanh_backward),
        row("aten::sigmoid_backward", &at::meta::sigmoid_backward),
        row("aten::silu_backward", &at::meta::silu_backward),
        row("aten::gelu_backward", &at::meta::gelu_backward),
        row("aten::threshold_backward", &at::meta::threshold_backward),
        row("aten::mm", &at::meta::mm),
        row("aten::addmm", &at::meta::addmm),
        row("aten::bmm", &at::meta::bmm),
        row("aten::baddbmm", &at::meta::baddbmm),
        row("aten::sum.dim_IntList", &at::meta::sum),
        row("aten::mean.dim", &at::meta::mean),
        row("aten::cat", &at::meta::cat),
        row("aten::_softmax", &at::meta::_softmax),
        row("aten::_log_softmax", &at::meta::_log_softmax),
        row("aten::_softmax_backward_data", &at::meta::_softmax_backward_data),
        row("aten::_log_softmax_backward_data", &at::meta::_log_softmax_backward_data),
        row("aten::nll_loss_forward", &at::meta::nll_loss_forward),
        row("aten::nll_loss_backward", &at::meta::nll_loss_backward),
        row("aten::mse_loss", &at::meta::mse_loss),
        row("aten::embedding", &embedding),
        row("aten::embedding_dense_backward", &embedding_dense_backward),
        row("aten::stack", &stack),
        row("aten::empty_like", &at::native::empty_like),
        row("aten::ones_like", &at::native::empty_like),
        row("aten::zeros_like", &at::native::empty_like),
    };
}

}  // namespace

const c10::KernelFunction* meta_kernel_of(const c10::OperatorHandle& op) {
    static const Table& table = leaky_singleton<Table>(make_table());
    const auto found = table.find(c10::toString(op.operator_name()));
    return found == table.end() ? nullptr : &found->second;
}

}  // namespace rekindle
