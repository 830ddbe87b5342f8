// Chooses the dispatch key at which the runtime intercepts operators. No other file names the key.
//
// NOTE [The dispatch key]
//
// The key must come after autograd in dispatch order, so that the fallback sees the operators that
// autograd runs and the tensors it saves. From torch 2.13 on it also comes after Python, so that
// dispatch modes and tensor subclasses run first. In earlier versions the fallback would not see
// the operators that modes and subclasses call, so such programs are refused.
//
// `Fake` is such a key, and torch registers no kernel for it so far. PyTorch reserves it for a
// FakeTensor in C++. Once torch has that, `register_at_key` fails with a message, and the native
// core does not start. Two fallbacks at one key are impossible: the dispatcher refuses the second
// and gives no access to the first.
//
// `CustomRNGKeyId`, which is free for projects outside PyTorch, is no alternative. It comes after
// `BackendSelect` and `Sparse`, so factory functions and sparse tensors bypass it. It serves as
// `REPLAY_KEY`, for collectives only.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

#include <string>

namespace rekindle {

inline constexpr c10::DispatchKey KEY = c10::DispatchKey::Fake;

// True if dispatch modes and tensor subclasses run before the runtime's key (since torch 2.13).
inline constexpr bool PYTHON_COMES_FIRST =
    static_cast<int>(KEY) < static_cast<int>(c10::DispatchKey::Python);

inline constexpr c10::DispatchKeySet BELOW_KEY(c10::DispatchKeySet::FULL_AFTER, KEY);

// A thread includes this key while it recomputes an operator that is not PyTorch's own. Collectives
// have a kernel at this key that raises; all other operators pass through.
inline constexpr c10::DispatchKey REPLAY_KEY = c10::DispatchKey::CustomRNGKeyId;

// Register `fallback` at Rekindle's dispatch key, for every operator that has no kernel of its own
// there, in threads that include the key. Must be called once. Return the reason if registration is
// impossible, else an empty string.
const char* register_at_key(torch::CppFunction&& fallback);
// Return a library through which kernels of single operators are registered at the dispatch key
// `key`. The library is never destroyed.
torch::Library& library_at_key(const char* operators, c10::DispatchKey key = KEY);
// Let all operators pass through `REPLAY_KEY`, except those that get a kernel there later. Return
// false if another library uses the key.
bool open_replay_key();
// Return the keys that a thread includes while it recomputes an operator that is not PyTorch's own:
// `REPLAY_KEY`, or none if another library uses it.
c10::DispatchKeySet replay_keys() noexcept;

// Register `kernel`, a function with the C++ type of the operator `Op`, in `library`.
template <class Op, auto kernel>
void register_kernel(torch::Library& library) {
    std::string name = Op::name;
    if (*Op::overload_name != '\0') {
        name += std::string(".") + Op::overload_name;
    }
    library.impl(name.c_str(), torch::CppFunction::makeFromUnboxedFunction(TORCH_FN(kernel)));
}

}  // namespace rekindle
