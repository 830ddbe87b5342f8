// The dispatch key at which operators are seen, and the only place that chooses it.
//
// It has to come below autograd, so that what autograd saves and what it runs is seen, and (from
// torch 2.13 on) below Python, so that modes and subclasses come first. Before that, what those
// call in their turn would not be seen, and is refused.
//
// `Fake` is such a key, and no kernel of torch's is registered for it so far. PyTorch means it for
// a FakeTensor in C++: once that stands there, `register_at_key` says so, and the core is not
// started. Two fallbacks at one key are refused by the dispatcher, and the former one cannot be
// asked for, so there is none to pass calls on to. `CustomRNGKeyId`, which is for others than
// PyTorch, comes below `BackendSelect` and `Sparse`: factories and sparse tensors pass it by.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

namespace rekindle {

inline constexpr c10::DispatchKey KEY = c10::DispatchKey::Fake;

// Whether dispatch modes and subclasses come before the key (since torch 2.13).
inline constexpr bool PYTHON_COMES_FIRST =
    static_cast<int>(KEY) < static_cast<int>(c10::DispatchKey::Python);

inline constexpr c10::DispatchKeySet BELOW_KEY(c10::DispatchKeySet::FULL_AFTER, KEY);

// From now on every operator without a kernel of its own at the key runs `fallback`, in threads
// that include the key. Returns why it cannot be, empty if all is well. Once.
const char* register_at_key(torch::CppFunction&& fallback);
// What registers kernels of single operators there, for good.
torch::Library& library_at_key(const char* operators);

}  // namespace rekindle
