#include "dispatch_key.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>

#include "../base/slab.h"

namespace rekindle {

namespace {

// True once `open_replay_key` has succeeded, before any operator is recomputed.
bool& replay_key_is_open() noexcept {
    static constinit bool is_open = false;
    return is_open;
}

}  // namespace

const char* register_at_key(torch::CppFunction&& fallback) {
    if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(KEY)) {
        return "another library uses the dispatch key that the native core needs (Fake)";
    }
    library_at_key("_").fallback(std::move(fallback));
    return "";
}

bool open_replay_key() {
    if (!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(REPLAY_KEY)) {
        library_at_key("_", REPLAY_KEY).fallback(torch::CppFunction::makeFallthrough());
        replay_key_is_open() = true;
    }
    return replay_key_is_open();
}

c10::DispatchKeySet replay_keys() noexcept {
    return replay_key_is_open() ? c10::DispatchKeySet(REPLAY_KEY) : c10::DispatchKeySet();
}

torch::Library& library_at_key(const char* operators, c10::DispatchKey key) {
    return leaky_singleton<torch::Library>(
        torch::Library::IMPL, operators, key, __FILE__, __LINE__
    );
}

}  // namespace rekindle
