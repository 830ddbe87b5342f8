#include "placeholder.h"

#include <memory>
#include <utility>

#include "free_queue.h"

namespace rekindle {

namespace {

constexpr const char* READ =
    "The memory of this tensor was evicted by rekindle.budget(...), but code that Rekindle cannot "
    "see reads the memory (such as a custom kernel that is no operator of PyTorch). Write "
    "rekindle.budget(..., evict=\"saved\"), which never evicts tensors that variables hold";

constexpr const char* READ_IN_CHILD =
    "rekindle.budget(...) evicted the memory of this tensor before this process was forked, and an "
    "operator of a forked process cannot bring it back. Write run.keep(tensor) before the fork; or "
    "read the tensor in this process first without an operator, as by tensor.tolist() or "
    "torch.save; or start the process by \"spawn\"";

// True in a process that was forked inside a budget.
bool in_child = false;

// Return the data pointer of an evicted storage (placeholder): a null pointer with a unique address
// as its context. When the placeholder is freed, this address goes into the queue of freed
// addresses.
c10::DataPtr token(c10::Device device) {
    void* made = std::make_unique<char>().release();
    return {nullptr, made, &free_placeholder, device};
}

// True if this version of torch can make the storage of a placeholder readable again.
template <class Storage>
constexpr bool CAN_BE_READ_AGAIN = requires(Storage& storage_impl) {
    storage_impl.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string());
    storage_impl.clear_data_ptr_access_error_msg_();
};

template <class Storage>
void refuse(Storage& storage_impl) {
    if constexpr (CAN_BE_READ_AGAIN<Storage>) {
        storage_impl.release_data_and_set_meta_custom_data_ptr_error_msg_(
            in_child ? READ_IN_CHILD : READ
        );
    }
}

template <class Storage>
void allow(Storage& storage_impl) {
    if constexpr (CAN_BE_READ_AGAIN<Storage>) {
        storage_impl.clear_data_ptr_access_error_msg_();
    }
}

}  // namespace

bool can_make_placeholders() noexcept {
    return CAN_BE_READ_AGAIN<c10::StorageImpl>;
}

c10::intrusive_ptr<c10::StorageImpl> make_placeholder(c10::StorageImpl& storage_impl) {
    auto memory = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(),
        storage_impl.nbytes(),
        std::move(storage_impl._mutable_data_ptr_no_checks()),
        storage_impl.allocator(),
        true
    );
    refuse(storage_impl);
    storage_impl.set_data_ptr_noswap(token(storage_impl.device()));
    return memory;
}

void restore_into(c10::StorageImpl& storage_impl, c10::StorageImpl& from) {
    allow(storage_impl);
    storage_impl.set_data_ptr_noswap(std::move(from._mutable_data_ptr_no_checks()));
}

bool is_placeholder(const c10::StorageImpl& storage_impl) noexcept {
    return placeholder_id(
               const_cast<c10::StorageImpl&>(storage_impl)._mutable_data_ptr_no_checks()
           ) != nullptr;
}

bool allow_reading(c10::StorageImpl& storage_impl) {
    const bool placeholder = is_placeholder(storage_impl);
    if (placeholder) {
        allow(storage_impl);
    }
    return placeholder;
}

void refuse_reading(c10::StorageImpl& storage_impl) {
    if (is_placeholder(storage_impl)) {
        refuse(storage_impl);
    }
}

void name_fork_in_errors() noexcept {
    in_child = true;
}

const void* placeholder_id(const c10::DataPtr& data) noexcept {
    return data.get_deleter() == &free_placeholder ? data.get_context() : nullptr;
}

}  // namespace rekindle
