#include "replay_dispatch_guard.h"

#include <c10/core/DispatchKeySet.h>

#include <utility>

#include "dispatch_key.h"

namespace rekindle {

namespace {

// All dispatch keys that come before the runtime's key: autograd and everything above it.
c10::DispatchKeySet excluded() {
    return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
           c10::DispatchKeySet(KEY) | c10::DispatchKeySet(c10::DispatchKey::Python) |
           c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot) |
           c10::DispatchKeySet(c10::DispatchKey::FuncTorchDynamicLayerBackMode) |
           c10::DispatchKeySet(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) |
           c10::DispatchKeySet(c10::DispatchKey::FuncTorchVmapMode) |
           c10::DispatchKeySet(c10::DispatchKey::VmapMode) |
           c10::DispatchKeySet(c10::DispatchKey::Functionalize) |
           c10::DispatchKeySet(c10::DispatchKey::Tracer) |
           c10::DispatchKeySet(c10::DispatchKey::PreDispatch) |
           c10::DispatchKeySet(c10::DispatchKey::PythonDispatcher);
}

}  // namespace

ReplayDispatchGuard::ReplayDispatchGuard(bool grad_mode)
    : keys_(c10::DispatchKeySet(c10::DispatchKey::BackendSelect), excluded()),
      before_(c10::AutogradState::get_tls_state()) {
    c10::AutogradState now = before_;
    now.set_grad_mode(grad_mode);
    now.set_inference_mode(false);
    c10::AutogradState::set_tls_state(std::move(now));
}

ReplayDispatchGuard::~ReplayDispatchGuard() {
    c10::AutogradState::set_tls_state(before_);
}

}  // namespace rekindle
