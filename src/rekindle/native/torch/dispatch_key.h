// Chooses the dispatch key at which the runtime intercepts operators. No other file names the key.
//
// NOTE [The dispatch key]
//
// The key must come after autograd in dispatch order, so that the fallback sees the operators that
// autograd runs and the tensors it saves. From torch 2.13 on it also comes after Python, so that
// dispatch modes and tensor subclasses run first. In earlier versions the fallback would not see
// the operators that modes and subclasses call, so such programs are refused.
//
// `Fake` is such a key. PyTorch reserves it for a FakeTensor in C++, so two cases exist:
//
// - PyTorch has no fallback there (up to 2.15). Then Rekindle registers one (`register_at_key`).
// - PyTorch has a fallback there. The dispatcher refuses a second one. So Rekindle registers a
//   kernel for each operator, also for operators that are defined later (`take_over`). A kernel of
//   Rekindle passes a call on to PyTorch's kernel (`call_kernel_behind`) if the thread is in a
//   FakeTensor mode or an argument is a fake tensor. `shares_key` is true in this case.
//
// PyTorch's FakeTensor mode includes the key too, and may clear it for the thread when the mode
// ends. `join` (memory/session.h) notes which threads need the key, and `rejoin` includes it again.
// Until then the core sees no operators of the thread: their results are memory of others.
//
// `CustomRNGKeyId`, which is free for projects outside PyTorch, is no alternative. It comes after
// `BackendSelect` and `Sparse`, so factory functions and sparse tensors bypass it. It serves as
// `REPLAY_KEY`, for collectives only.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

namespace rekindle {

inline constexpr c10::DispatchKey KEY = c10::DispatchKey::Fake;

// True if dispatch modes and tensor subclasses run before the runtime's key (since torch 2.13).
inline constexpr bool PYTHON_COMES_FIRST =
    static_cast<int>(KEY) < static_cast<int>(c10::DispatchKey::Python);

inline constexpr c10::DispatchKeySet BELOW_KEY(c10::DispatchKeySet::FULL_AFTER, KEY);

// A thread includes this key while it recomputes an operator that is not PyTorch's own. Collectives
// have a kernel at this key that raises; all other operators pass through.
inline constexpr c10::DispatchKey REPLAY_KEY = c10::DispatchKey::CustomRNGKeyId;

// A function that makes a kernel for any operator.
using MakeKernel = torch::CppFunction (*)();

// True if PyTorch has a fallback of its own at the dispatch key. Set by `look_behind`.
inline constinit bool shares_key = false;

// Find out whether PyTorch has a fallback of its own at the dispatch key. Must be called once,
// before any kernel is registered.
void look_behind();
// Register the kernel that `make` makes at Rekindle's dispatch key, for every operator that has no
// kernel from `register_kernel`. Must be called once.
void register_at_key(MakeKernel make);
// Register the kernel of `register_at_key` for the operators that were defined since the last call.
void take_over_new_operators();

// Return true if `tensor` is a FakeTensor in C++.
inline bool is_fake(const at::Tensor& tensor) noexcept {
    return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(KEY);
}

// Return true if this thread is in one of PyTorch's FakeTensor modes in C++.
bool is_in_fake_mode() noexcept;
// Run PyTorch's own kernel at the dispatch key. Requires `shares_key`.
void call_kernel_behind(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack
);
// Let all operators pass through `REPLAY_KEY`, except those that get a kernel there later. Return
// false if another library uses the key.
bool open_replay_key();
// Return the keys that a thread includes while it recomputes an operator that is not PyTorch's own:
// `REPLAY_KEY`, or none if another library uses it.
c10::DispatchKeySet replay_keys() noexcept;

// Register `kernel` for the operator `name` at the dispatch key `key`.
void register_kernel(
    const c10::OperatorName& name, torch::CppFunction&& kernel, c10::DispatchKey key = KEY
);

// Return the overload `Op` of PyTorch's dispatcher.
template <class Op>
c10::OperatorHandle find() {
    return c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
}

// Register `kernel`, a function with the C++ type of the operator `Op`, at Rekindle's dispatch key.
template <class Op, auto kernel>
void register_kernel() {
    register_kernel(
        {Op::name, Op::overload_name}, torch::CppFunction::makeFromUnboxedFunction(TORCH_FN(kernel))
    );
}

}  // namespace rekindle
