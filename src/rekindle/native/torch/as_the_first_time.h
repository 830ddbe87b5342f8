// Thread state in which a recorded call runs again, and in which the runtime runs operators of its
// own.
#pragma once

#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace rekindle {

// Scope below autograd, autocast and dispatch modes, at the point where the fallback saw the call.
// Sets the grad mode that the call had.
class AsTheFirstTime final {
public:
    explicit AsTheFirstTime(bool grad_mode);
    AsTheFirstTime(const AsTheFirstTime&) = delete;
    AsTheFirstTime& operator=(const AsTheFirstTime&) = delete;
    AsTheFirstTime(AsTheFirstTime&&) = delete;
    AsTheFirstTime& operator=(AsTheFirstTime&&) = delete;
    ~AsTheFirstTime();

private:
    c10::impl::ForceDispatchKeyGuard keys_;
    c10::AutogradState before_;
};

}  // namespace rekindle
