#include "typed_kernels.h"

#include <ATen/ops/_log_softmax_backward_data_ops.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_softmax_backward_data_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/sigmoid_backward_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/tanh_backward_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/threshold_backward_ops.h>

#include "../ops/operator_call.h"
#include "../torch/dispatch_key.h"
#include "runtime.h"

namespace rekindle {

namespace {

// Kernel of the operator `Op` for Rekindle's dispatch key. `twin` calls the overload that writes
// the result into a given tensor; null if the core does not use it.
template <class Op, auto twin, auto redispatch>
struct Kernel;

template <
    class Op,
    auto twin,
    class Result,
    class... Arguments,
    Result (*redispatch)(c10::DispatchKeySet, Arguments...)>
struct Kernel<Op, twin, redispatch> final {
    static Result run(c10::DispatchKeySet keys, Arguments... arguments) {
        static const c10::OperatorHandle op = find<Op>();
        static const Facts* facts = nullptr;  // guarded by the session mutex
        TypedCall<Result, Arguments...> call(op, keys, facts, redispatch, twin, arguments...);
        on_operator(call);
        return call.take_result();
    }
};

template <class Op, auto twin = nullptr>
void add(torch::Library& aten) {
    register_kernel<Op, &Kernel<Op, twin, &Op::redispatch>::run>(aten);
}

// The same for a backward operator whose result may be written over its incoming gradient.
template <class Op, class Twin>
void add_backward(torch::Library& aten) {
    add<Op, &Twin::redispatch>(aten);
}

}  // namespace

void register_typed_kernels(torch::Library& aten) {
    add<at::_ops::_log_softmax>(aten);
    add<at::_ops::_softmax>(aten);
    add<at::_ops::add_Tensor>(aten);
    add<at::_ops::add__Tensor>(aten);
    add<at::_ops::addmm>(aten);
    add<at::_ops::bmm>(aten);
    add<at::_ops::copy_>(aten);
    add<at::_ops::div__Scalar>(aten);
    add<at::_ops::exp>(aten);
    add<at::_ops::gelu>(aten);
    add<at::_ops::mean>(aten);
    add<at::_ops::mean_dim>(aten);
    add<at::_ops::mm>(aten);
    add<at::_ops::mul__Tensor>(aten);
    add<at::_ops::neg>(aten);
    add<at::_ops::pow_Tensor_Scalar>(aten);
    add<at::_ops::relu>(aten);
    add<at::_ops::relu_>(aten);
    add<at::_ops::rsqrt>(aten);
    add<at::_ops::sigmoid>(aten);
    add<at::_ops::sigmoid_>(aten);
    add<at::_ops::silu>(aten);
    add<at::_ops::sub_Tensor>(aten);
    add<at::_ops::sum>(aten);
    add<at::_ops::sum_dim_IntList>(aten);
    add<at::_ops::tanh>(aten);
    add<at::_ops::tanh_>(aten);
    add_backward<at::_ops::_log_softmax_backward_data, at::_ops::_log_softmax_backward_data_out>(
        aten
    );
    add_backward<at::_ops::_softmax_backward_data, at::_ops::_softmax_backward_data_out>(aten);
    add_backward<at::_ops::div_Tensor, at::_ops::div_out>(aten);
    add_backward<at::_ops::gelu_backward, at::_ops::gelu_backward_grad_input>(aten);
    add_backward<at::_ops::mul_Tensor, at::_ops::mul_out>(aten);
    add_backward<at::_ops::sigmoid_backward, at::_ops::sigmoid_backward_grad_input>(aten);
    add_backward<at::_ops::tanh_backward, at::_ops::tanh_backward_grad_input>(aten);
    add_backward<at::_ops::threshold_backward, at::_ops::threshold_backward_grad_input>(aten);
}

}  // namespace rekindle
