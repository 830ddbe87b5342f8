// Repeats an operator call without side effects.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>
#include <span>

#include "../torch/rng_history.h"
#include "signature.h"

namespace rekindle {

// Return PyTorch's global flags with which a call of `signature` is repeated: those of the first
// call. The default dtype is the present one if no result depends on it, so that it need not be
// set.
std::int64_t flags_of(const Signature& signature);
// Call the operator of `signature` again. `tensors` are its tensor arguments. The operator draws
// from private generators that begin in the states `random`, those at the first call. PyTorch's
// global flags are set as at the first call, and for an operator that is not PyTorch's own the
// state of the thread (`ThreadState`). `calling` receives the kernel and runs it.
torch::jit::Stack call_again(
    const Signature& signature,
    std::span<at::Tensor> tensors,
    std::span<const c10::IValue> unkeyed_args,
    std::span<const std::unique_ptr<RngCheckpoint>> random,
    bool grad_mode,
    c10::function_ref<void(c10::function_ref<void()>)> calling
);

}  // namespace rekindle
