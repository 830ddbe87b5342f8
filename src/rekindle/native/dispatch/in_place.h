// Backward operators that write their result over the gradient that they read, if it dies there.
//
// The kernel is the same and reads each element before it writes it: the bits are equal, and the
// result takes no memory. rekindle.pytorch.operators._in_place lists the operators, with reasons.
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
// Note that an operator runs on this thread after that.
void forget_unpacked() noexcept;

// Whether the result of a call is written over the first argument.
enum class TakesOver : std::uint8_t {
    no,
    yes,
    without_modes,  // no, but yes if no dispatch mode of ours were active and the argument dies
};

// Decide for a call of the operator of `facts`, which has an entry, with the arguments `given`.
// Must be called once per call, with the core's lock.
TakesOver takes_over(
    Driver& driver, const Facts& facts, bool pointwise, std::span<const c10::IValue> given
);

}  // namespace rekindle
