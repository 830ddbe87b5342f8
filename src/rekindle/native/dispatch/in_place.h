// Lets backward operators write their result over the incoming gradient, if nothing uses this
// gradient afterwards.
//
// The kernel is the same, and reads each element before it writes that element. So the result has
// the same bits, and takes no additional memory. rekindle.pytorch.operators._in_place lists these
// operators, with reasons.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>

#include "../memory/session.h"
#include "../ops/facts.h"
#include "../ops/operator_call.h"

namespace rekindle {

// Record that autograd unpacked the saved tensor `saved` on this thread. `node` is the backward
// node that runs, or null.
void note_unpacked(const torch::autograd::Node* node, const at::Tensor& saved);
// Forget the saved tensor that `note_unpacked` recorded, because another operator ran on this
// thread after autograd unpacked it.
void forget_unpacked() noexcept;

// Return true if the first input of `node` requires a gradient, and no other input does.
bool only_first_leads_on(const torch::autograd::Node& node);

// Whether an operator call writes its result over its first argument, the incoming gradient.
enum class TakesOver : std::uint8_t {
    no,
    yes,
    // It does not, but it would if Rekindle's own dispatch mode were off and nothing else used the
    // argument.
    without_modes,
};

// Decide whether `call`, a call of the operator `facts`, writes its result over its first argument,
// the incoming gradient. `facts.in_place` must be set, and grad mode off. Must be called once per
// call, with the session mutex.
TakesOver takes_over(Session& session, const Facts& facts, OperatorCall& call);

}  // namespace rekindle
