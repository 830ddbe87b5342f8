// State of a thread on which the body of an operator may depend, if the operator is not PyTorch's
// own. A recomputation runs the body in the state of the first run.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace rekindle {

// The state of a thread when an operator was called, packed into words of the call's signature:
// grad mode, autocast, and the dispatch keys that the thread includes and excludes.
struct ThreadState final {
    static constexpr std::size_t WORDS = 4;

    // Return the state of this thread. `keys`: the dispatch keys of the call.
    static std::array<std::int64_t, WORDS> words(c10::DispatchKeySet keys);
    // Return the state from the last words of a signature's key.
    static ThreadState in(std::span<const std::int64_t> key);

    // Keys of the call after the runtime's key. The first of them gives the kernel.
    c10::DispatchKeySet keys;
    c10::DispatchKeySet included;
    c10::DispatchKeySet excluded;
    std::int64_t settings;
};

// Scope in which autocast keeps no casts of weights. The body of an operator then casts each weight
// itself, and leaves nothing to other operators.
class ScopedWithoutCastCache final {
public:
    ScopedWithoutCastCache();
    ScopedWithoutCastCache(const ScopedWithoutCastCache&) = delete;
    ScopedWithoutCastCache& operator=(const ScopedWithoutCastCache&) = delete;
    ~ScopedWithoutCastCache();

private:
    const bool before_;
};

// Scope in which this thread has the state of a first run. The program's dispatch modes and the
// runtime see no operator that the body calls. A collective that the body calls raises.
class ScopedThreadState final {
public:
    explicit ScopedThreadState(const ThreadState& then);
    ScopedThreadState(const ScopedThreadState&) = delete;
    ScopedThreadState& operator=(const ScopedThreadState&) = delete;
    ~ScopedThreadState();

private:
    // Destroyed last: setting modes also changes the included keys.
    const c10::impl::ForceDispatchKeyGuard keys_;
    const at::impl::PythonTorchFunctionTLS functions_;
    const c10::impl::TorchDispatchModeTLS modes_;
    const c10::AutogradState autograd_;
    const std::array<c10::ScalarType, 2> autocast_;
    const ScopedWithoutCastCache without_cache_;
};

}  // namespace rekindle
