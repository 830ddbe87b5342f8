// Lets backward operators write their result over the incoming gradient, if nothing uses this
// gradient afterwards.
//
// The kernel is the same, and reads each element before it writes that element. So the result has
// the same bits, and takes no additional memory. rekindle.pytorch.operators._in_place lists these
// operators, with reasons.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <span>

#include "../memory/driver.h"
#include "../ops/facts.h"

namespace rekindle {

// Note that autograd unpacked `saved` on this thread, for the current node.
void note_unpacked(const at::Tensor& saved);
// Forget the tensor that `note_unpacked` noted, because another operator runs on this thread.
void forget_unpacked() noexcept;

// Answers to the question: is the result of this call written over the first argument?
enum class TakesOver : std::uint8_t {
    no,
    yes,
    // No; yes if rekindle's own dispatch mode were off and nothing else used the argument.
    without_modes,
};

// Decide for a call of an operator in the list of such operators, described by `facts`, with the
// arguments `given`. Must be called once per call, with the session mutex.
TakesOver takes_over(
    Driver& driver, const Facts& facts, bool pointwise, std::span<const c10::IValue> given
);

}  // namespace rekindle
