// Code that differs between versions of torch. No other file checks torch's version.
#pragma once

#include <c10/core/Stream.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#if TORCH_VERSION_MAJOR < 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 11)
#error "the native core needs torch 2.11"
#endif

// Autograd's engine returns the hooks that the program has set for new nodes of the graph.
#define REKINDLE_ENGINE_HAS_NODE_HOOKS (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14)

namespace rekindle {

// Return true if work queued on `stream` is captured into a CUDA graph. Before torch 2.13 only the
// CUDA runtime can tell, which torch has loaded.
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

// Pointer to a node of the autograd graph. The type depends on torch's version.
using NodePointer = decltype(torch::autograd::Edge::function);

}  // namespace rekindle
