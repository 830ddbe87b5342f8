#include "poison.h"

#include <ATen/core/Tensor.h>
#include <c10/core/impl/COW.h>

#include <cstdlib>
#include <string_view>

#include "as_the_first_time.h"
#include "homes.h"

namespace rekindle {

bool poisons() noexcept {
    static const bool asked = [] {
        const char* said = std::getenv("REKINDLE_POISON");  // NOLINT(concurrency-mt-unsafe): once
        const std::string_view text = said == nullptr ? "" : said;
        return !text.empty() && text != "0";
    }();
    return asked;
}

void poison(const Home& home) {
    if (c10::impl::cow::is_cow_data_ptr(home->data_ptr())) {
        return;  // The memory is shared copy-on-write.
    }
    const AsTheFirstTime guard(false);
    whole_of(home).fill_(0xFF);
}

}  // namespace rekindle
