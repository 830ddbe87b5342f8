// What differs between versions of torch, and the only place that asks for them.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#if TORCH_VERSION_MAJOR < 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13)
#error "the native core needs torch 2.13: before, dispatch modes come below its key"
#endif

namespace rekindle {

// The dispatch key at which operators are seen: below autograd and below Python, so that modes and
// subclasses come first. No kernel of torch's is registered for it.
inline constexpr c10::DispatchKey KEY = c10::DispatchKey::Fake;
static_assert(static_cast<int>(KEY) < static_cast<int>(c10::DispatchKey::Python));

inline constexpr c10::DispatchKeySet BELOW_KEY(c10::DispatchKeySet::FULL_AFTER, KEY);

// A pointer to a node of autograd's graph, of one kind or another.
using NodePointer = decltype(torch::autograd::Edge::function);

}  // namespace rekindle
