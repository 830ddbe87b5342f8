// Random generators of Rekindle's own, from which an operator draws in place of the program's.
//
// NOTE [Private generators]
//
// A recomputation draws the numbers of the first run again (R5, randomness), and changes no
// generator of the program meanwhile (R9, everything else runs once): other threads may draw from
// them at any time. So it draws from private generators, which begin in the recorded states.
//
// 1. Most operators that draw have an argument for a generator. It gets the private generator, also
//    if the program passed none and so drew from the default generator.
// 2. Others draw only in operators that they call: `rand` calls `uniform_`. While such an operator
//    runs, the operators that it calls pass Rekindle's dispatch key, where `intercept` gives them
//    the private generator. Code of the program, such as a custom operator, is treated so too.
// 3. On an accelerator some kernels draw from the default generator themselves: fused dropout and
//    attention. Only for them, the default generator gets the state of the private one while the
//    kernel is launched. The session mutex is held then, so threads within the budget draw nothing
//    meanwhile. A thread outside the budget could.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <span>

#include "rng_history.h"

namespace rekindle {

// One private generator for each generator whose state was recorded.
class PrivateGenerators final {
public:
    explicit PrivateGenerators(std::span<const std::unique_ptr<RngCheckpoint>> states);
    PrivateGenerators(const PrivateGenerators&) = delete;
    PrivateGenerators& operator=(const PrivateGenerators&) = delete;
    ~PrivateGenerators() = default;

    // Call the operator `op` with the arguments on `stack`, and let it draw from the private
    // generators.
    void call(const c10::OperatorHandle& op, torch::jit::Stack& stack);
    // Let an operator that is not PyTorch's own draw from the private generators. `body` runs its
    // kernel with the arguments on `stack`. An argument without a generator stays so, and the body
    // draws from the default generators.
    void call_body(
        const c10::OperatorHandle& op, torch::jit::Stack& stack, c10::function_ref<void()> body
    );
    // Let an operator draw from the private generators. The kernel of another operator has called
    // it, in `call`. `run` runs its kernel with the arguments on `stack`.
    void intercept(
        const c10::OperatorHandle& op, torch::jit::Stack& stack, c10::function_ref<void()> run
    );

    // Return the object in whose `call` this thread is, if it intercepts operators, else null.
    static PrivateGenerators* current() noexcept {
        return intercepting.load(std::memory_order_relaxed) == 0 ? nullptr : of_this_thread();
    }

private:
    struct Pair final {
        at::Generator programs;
        at::Generator own;
    };

    class Intercepting;

    static PrivateGenerators*& of_this_thread() noexcept;
    const Pair* default_on(c10::Device device) const;
    bool pass_to(
        const c10::OperatorHandle& op, torch::jit::Stack& stack, bool for_default = true
    ) const;
    const Pair* drawn_by_kernel(
        const c10::OperatorHandle& op, const torch::jit::Stack& stack
    ) const;

    inline static std::atomic<int> intercepting = 0;  // number of threads that intercept operators
    c10::SmallVector<Pair, 1> pairs_;
};

}  // namespace rekindle
