// Thread state in which a recorded call runs again, and in which the runtime runs operators of its
// own.
#pragma once

#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace rekindle {

// Scope below autograd, autocast and dispatch modes, at the point where the fallback saw the call.
// Sets the grad mode that the call had.
class ReplayDispatchGuard final {
public:
    explicit ReplayDispatchGuard(bool grad_mode);
    ReplayDispatchGuard(const ReplayDispatchGuard&) = delete;
    ReplayDispatchGuard& operator=(const ReplayDispatchGuard&) = delete;
    ReplayDispatchGuard(ReplayDispatchGuard&&) = delete;
    ReplayDispatchGuard& operator=(ReplayDispatchGuard&&) = delete;
    ~ReplayDispatchGuard();

private:
    c10::impl::ForceDispatchKeyGuard keys_;
    c10::AutogradState before_;
};

}  // namespace rekindle
