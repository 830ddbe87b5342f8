#include "husk.h"

#include <memory>
#include <utility>

#include "deaths.h"

namespace rekindle {

namespace {

constexpr const char* READ =
    "The memory of this tensor was evicted by rekindle.budget(...), and something reads it by a "
    "way that is not seen, as a kernel of one's own that is no operator of PyTorch. Write "
    "rekindle.budget(..., evict=\"saved\"), which never touches what variables hold";

// Data of a placeholder: a null pointer, and a context whose unique address is reported when it is
// freed.
c10::DataPtr token(c10::Device device) {
    void* made = std::make_unique<char>().release();
    return {nullptr, made, &tell_and_forget_token, device};
}

// True if this torch can make such a storage readable again.
template <class Storage>
constexpr bool CAN_BE_READ_AGAIN = requires(Storage& home) {
    home.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string());
    home.clear_data_ptr_access_error_msg_();
};

template <class Storage>
void refuse(Storage& home) {
    if constexpr (CAN_BE_READ_AGAIN<Storage>) {
        home.release_data_and_set_meta_custom_data_ptr_error_msg_(READ);
    }
}

template <class Storage>
void allow(Storage& home) {
    if constexpr (CAN_BE_READ_AGAIN<Storage>) {
        home.clear_data_ptr_access_error_msg_();
    }
}

}  // namespace

bool there_are_husks() noexcept {
    return CAN_BE_READ_AGAIN<c10::StorageImpl>;
}

void become_husk(c10::StorageImpl& home) {
    refuse(home);
    home.set_data_ptr_noswap(token(home.device()));
}

void fill_husk(c10::StorageImpl& home, c10::StorageImpl& from) {
    allow(home);
    home.set_data_ptr_noswap(std::move(from._mutable_data_ptr_no_checks()));
}

bool is_husk(const c10::StorageImpl& home) noexcept {
    return token_of(const_cast<c10::StorageImpl&>(home)._mutable_data_ptr_no_checks()) != nullptr;
}

bool allow_reading(c10::StorageImpl& home) {
    const bool husk = is_husk(home);
    if (husk) {
        allow(home);
    }
    return husk;
}

void refuse_reading(c10::StorageImpl& home) {
    if (is_husk(home)) {
        refuse(home);
    }
}

const void* token_of(const c10::DataPtr& data) noexcept {
    return data.get_deleter() == &tell_and_forget_token ? data.get_context() : nullptr;
}

}  // namespace rekindle
