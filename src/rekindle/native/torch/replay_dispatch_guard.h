// Dispatch state of a thread in which the runtime recomputes a recorded call or runs operators of
// its own.
#pragma once

#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace rekindle {

// Scope in which operators skip autograd, autocast and dispatch modes, and are not intercepted by
// the runtime. Sets the grad mode that the recorded call had.
class ReplayDispatchGuard final {
public:
    explicit ReplayDispatchGuard(bool grad_mode);
    ReplayDispatchGuard(const ReplayDispatchGuard&) = delete;
    ReplayDispatchGuard& operator=(const ReplayDispatchGuard&) = delete;
    ~ReplayDispatchGuard();

private:
    c10::impl::ForceDispatchKeyGuard keys_;
    c10::AutogradState before_;
};

}  // namespace rekindle
