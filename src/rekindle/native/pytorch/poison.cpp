#include "poison.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdlib>
#include <cstring>
#include <string_view>

#include "versions.h"

namespace rekindle {

bool poisons() noexcept {
    static const bool asked = [] {
        const char* said = std::getenv("REKINDLE_POISON");  // NOLINT(concurrency-mt-unsafe): once
        const std::string_view text = said == nullptr ? "" : said;
        return !text.empty() && text != "0";
    }();
    return asked;
}

void poison(const c10::intrusive_ptr<c10::StorageImpl>& home) {
    if (c10::impl::cow::is_cow_data_ptr(home->data_ptr())) {
        return;  // others have it as well
    }
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard hidden(
        c10::DispatchKeySet(KEY) | c10::DispatchKeySet(c10::DispatchKey::Python) |
        c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot)
    );
    const auto options = at::TensorOptions(at::kByte).device(home->device());
    at::empty({0}, options).set_(c10::Storage(home)).fill_(0xFF);
}

}  // namespace rekindle
