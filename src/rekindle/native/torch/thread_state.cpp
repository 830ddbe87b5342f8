#include "thread_state.h"

#include <ATen/autocast_mode.h>

#include "device.h"
#include "dispatch_key.h"

namespace rekindle {

namespace {

constexpr std::array AUTOCAST{c10::DeviceType::CPU, ACCELERATOR};
// Bits of `ThreadState::settings`.
constexpr std::int64_t GRAD_MODE = 1;
constexpr std::int64_t INFERENCE_MODE = 2;
constexpr int FUNCTIONS = 2;  // two bits: which overrides by `__torch_function__` are off
constexpr int DTYPES = 8;     // eight bits for each device of `AUTOCAST`

std::int64_t word_of(c10::DispatchKeySet keys) noexcept {
    return static_cast<std::int64_t>(keys.raw_repr());
}

c10::DispatchKeySet keys_in(std::int64_t word) noexcept {
    return {c10::DispatchKeySet::RAW, static_cast<std::uint64_t>(word)};
}

std::array<c10::ScalarType, AUTOCAST.size()> autocast_dtypes() {
    return {
        at::autocast::get_autocast_dtype(AUTOCAST[0]), at::autocast::get_autocast_dtype(AUTOCAST[1])
    };
}

// Remove the program's modes from this thread. Return them.
c10::impl::TorchDispatchModeTLS without_modes() {
    c10::impl::TorchDispatchModeTLS before = c10::impl::TorchDispatchModeTLS::get_state();
    c10::impl::TorchDispatchModeTLS::set_state({});
    return before;
}

}  // namespace

std::array<std::int64_t, ThreadState::WORDS> ThreadState::words(c10::DispatchKeySet keys) {
    const auto local = c10::impl::tls_local_dispatch_key_set();
    const c10::AutogradState& autograd = c10::AutogradState::get_tls_state();
    std::int64_t settings = autograd.get_grad_mode() ? GRAD_MODE : 0;
    settings |= autograd.get_inference_mode() ? INFERENCE_MODE : 0;
    const auto functions = at::impl::PythonTorchFunctionTLS::get_disabled_state();
    settings |= static_cast<std::int64_t>(functions) << FUNCTIONS;
    int shift = DTYPES;
    for (const c10::ScalarType dtype : autocast_dtypes()) {
        settings |= static_cast<std::int64_t>(dtype) << shift;
        shift += 8;
    }
    return {
        word_of(keys & BELOW_KEY),
        word_of(local.included_.remove(REPLAY_KEY)),
        word_of(local.excluded_.add(KEY)),
        settings
    };
}

ThreadState ThreadState::in(std::span<const std::int64_t> key) {
    const auto words = key.last(WORDS);
    return {keys_in(words[0]), keys_in(words[1]), keys_in(words[2]), words[3]};
}

ScopedWithoutCastCache::ScopedWithoutCastCache()
    : before_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
}

ScopedWithoutCastCache::~ScopedWithoutCastCache() {
    at::autocast::set_autocast_cache_enabled(before_);
}

ScopedThreadState::ScopedThreadState(const ThreadState& then)
    : keys_(then.included | replay_keys(), then.excluded),
      functions_(at::impl::PythonTorchFunctionTLS::get_state()),
      modes_(without_modes()),
      autograd_(c10::AutogradState::get_tls_state()),
      autocast_(autocast_dtypes()) {
    const auto disabled =
        static_cast<at::impl::TorchFunctionDisabledState>(then.settings >> FUNCTIONS & 3);
    at::impl::PythonTorchFunctionTLS::set_state({});
    at::impl::PythonTorchFunctionTLS::set_disabled_state(disabled);
    c10::AutogradState now = autograd_;
    now.set_grad_mode((then.settings & GRAD_MODE) != 0);
    now.set_inference_mode((then.settings & INFERENCE_MODE) != 0);
    c10::AutogradState::set_tls_state(now);
    int shift = DTYPES;
    for (const c10::DeviceType device : AUTOCAST) {
        at::autocast::set_autocast_dtype(
            device, static_cast<c10::ScalarType>(then.settings >> shift & 0xFF)
        );
        shift += 8;
    }
}

ScopedThreadState::~ScopedThreadState() {
    for (std::size_t i = 0; i < AUTOCAST.size(); ++i) {
        at::autocast::set_autocast_dtype(AUTOCAST[i], autocast_[i]);
    }
    c10::AutogradState::set_tls_state(autograd_);
    c10::impl::TorchDispatchModeTLS::set_state(modes_);
    at::impl::PythonTorchFunctionTLS::set_state(functions_);
}

}  // namespace rekindle
