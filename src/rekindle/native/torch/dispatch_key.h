// Chooses the dispatch key at which the runtime sees operators. No other file names it.
//
// NOTE [The dispatch key]
//
// The key must come below autograd, so that the fallback sees what autograd runs and saves. From
// torch 2.13 on it also comes below Python, so that dispatch modes and tensor subclasses run first.
// In earlier versions the operators that those call would not be seen, and are refused.
//
// `Fake` is such a key, and torch registers no kernel for it so far. PyTorch reserves it for a
// FakeTensor in C++. Once that exists, `register_at_key` fails with a message, and the core does
// not start. Two fallbacks at one key are impossible: the dispatcher refuses the second and gives
// no access to the first.
//
// `CustomRNGKeyId`, which is free for projects outside PyTorch, is no alternative. It comes below
// `BackendSelect` and `Sparse`, so factory functions and sparse tensors bypass it.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

namespace rekindle {

inline constexpr c10::DispatchKey KEY = c10::DispatchKey::Fake;

// True if dispatch modes and subclasses run before the key (since torch 2.13).
inline constexpr bool PYTHON_COMES_FIRST =
    static_cast<int>(KEY) < static_cast<int>(c10::DispatchKey::Python);

inline constexpr c10::DispatchKeySet BELOW_KEY(c10::DispatchKeySet::FULL_AFTER, KEY);

// Register `fallback` for each operator without a kernel of its own at the key, in threads that
// include the key. Call it once. Return the reason if it is impossible, otherwise an empty string.
const char* register_at_key(torch::CppFunction&& fallback);
// Return a library that registers kernels of single operators at the key. It is never destroyed.
torch::Library& library_at_key(const char* operators);

}  // namespace rekindle
