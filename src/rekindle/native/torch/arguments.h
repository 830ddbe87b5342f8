// The arguments and results of an operator on the dispatcher's stack.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <span>

namespace rekindle {

// Return the last `n` values of `stack`. `torch::jit::last` does the same, but the compiler does
// not inline it.
inline std::span<const c10::IValue> last_values(
    const torch::jit::Stack& stack, std::size_t n
) noexcept {
    return {stack.data() + (stack.size() - n), n};
}

}  // namespace rekindle
