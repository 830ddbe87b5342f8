#include "poison.h"

#include <ATen/core/Tensor.h>
#include <c10/core/impl/COW.h>

#include <cstdlib>
#include <string_view>

#include "replay_dispatch_guard.h"
#include "storage_ptr.h"

namespace rekindle {

bool poisons() noexcept {
    static const bool asked = [] {
        const char* said = std::getenv("REKINDLE_POISON");  // NOLINT(concurrency-mt-unsafe): once
        const std::string_view text = said == nullptr ? "" : said;
        return !text.empty() && text != "0";
    }();
    return asked;
}

void poison(const StoragePtr& storage_impl) {
    if (c10::impl::cow::is_cow_data_ptr(storage_impl->data_ptr())) {
        return;  // The memory is shared copy-on-write, so other storages still use it.
    }
    const ReplayDispatchGuard guard(false);
    whole_of(storage_impl).fill_(0xFF);
}

}  // namespace rekindle
