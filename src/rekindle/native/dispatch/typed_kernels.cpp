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
void add() {
    register_kernel<Op, &Kernel<Op, twin, &Op::redispatch>::run>();
}

// The same for a backward operator whose result may be written over its incoming gradient.
template <class Op, class Twin>
void add_backward() {
    add<Op, &Twin::redispatch>();
}

}  // namespace

void register_typed_kernels() {
    add<at::_ops::_log_softmax>();
    add<at::_ops::_softmax>();
    add<at::_ops::add_Tensor>();
    add<at::_ops::add__Tensor>();
    add<at::_ops::addmm>();
    add<at::_ops::bmm>();
    add<at::_ops::copy_>();
    add<at::_ops::div__Scalar>();
    add<at::_ops::exp>();
    add<at::_ops::gelu>();
    add<at::_ops::mean>();
    add<at::_ops::mean_dim>();
    add<at::_ops::mm>();
    add<at::_ops::mul__Tensor>();
    add<at::_ops::neg>();
    add<at::_ops::pow_Tensor_Scalar>();
    add<at::_ops::relu>();
    add<at::_ops::relu_>();
    add<at::_ops::rsqrt>();
    add<at::_ops::sigmoid>();
    add<at::_ops::sigmoid_>();
    add<at::_ops::silu>();
    add<at::_ops::sub_Tensor>();
    add<at::_ops::sum>();
    add<at::_ops::sum_dim_IntList>();
    add<at::_ops::tanh>();
    add<at::_ops::tanh_>();
    add_backward<at::_ops::_log_softmax_backward_data, at::_ops::_log_softmax_backward_data_out>();
    add_backward<at::_ops::_softmax_backward_data, at::_ops::_softmax_backward_data_out>();
    add_backward<at::_ops::div_Tensor, at::_ops::div_out>();
    add_backward<at::_ops::gelu_backward, at::_ops::gelu_backward_grad_input>();
    add_backward<at::_ops::mul_Tensor, at::_ops::mul_out>();
    add_backward<at::_ops::sigmoid_backward, at::_ops::sigmoid_backward_grad_input>();
    add_backward<at::_ops::tanh_backward, at::_ops::tanh_backward_grad_input>();
    add_backward<at::_ops::threshold_backward, at::_ops::threshold_backward_grad_input>();
}

}  // namespace rekindle
