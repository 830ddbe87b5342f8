#include "dispatch_key.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>

#include "../base/slab.h"

namespace rekindle {

const char* register_at_key(torch::CppFunction&& fallback) {
    if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(KEY)) {
        return "another library uses the dispatch key that the native core needs (Fake)";
    }
    library_at_key("_").fallback(std::move(fallback));
    return "";
}

torch::Library& library_at_key(const char* operators) {
    return leaky_singleton<torch::Library>(
        torch::Library::IMPL, operators, KEY, __FILE__, __LINE__
    );
}

}  // namespace rekindle
