// What differs between versions of torch, and the only place that asks for them.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Stream.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#if TORCH_VERSION_MAJOR < 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 11)
#error "the native core needs torch 2.11"
#endif

namespace rekindle {

// The dispatch key at which operators are seen: below autograd, and from torch 2.13 on below
// Python, so that modes and subclasses come first. Before that, what they call in their turn would
// not be seen, and is refused. No kernel of torch's is registered for it.
inline constexpr c10::DispatchKey KEY = c10::DispatchKey::Fake;

// Whether dispatch modes and subclasses come before the key (since torch 2.13).
inline constexpr bool PYTHON_COMES_FIRST =
    static_cast<int>(KEY) < static_cast<int>(c10::DispatchKey::Python);

inline constexpr c10::DispatchKeySet BELOW_KEY(c10::DispatchKeySet::FULL_AFTER, KEY);

// Whether what is launched on `stream` goes into a graph. Before torch 2.13 only CUDA's own
// runtime, which torch has loaded then, can tell.
template <class Guard>
bool writes_a_graph(const Guard& guard, const c10::Stream& stream) {
    if constexpr (requires { guard.isStreamCapturing(stream); }) {
        return guard.isStreamCapturing(stream);
    } else {
        using Ask = int (*)(void* stream, int* status);
        static const auto ask = reinterpret_cast<Ask>(dlsym(RTLD_DEFAULT, "cudaStreamIsCapturing"));
        int status = 0;
        return ask != nullptr && ask(guard.getStreamNativeHandle(stream), &status) == 0 &&
               status != 0;
    }
}

// A pointer to a node of autograd's graph, of one kind or another.
using NodePointer = decltype(torch::autograd::Edge::function);

}  // namespace rekindle
