#include "kernel_operands.h"

#include <algorithm>

namespace rekindle {

namespace {

// Return the `KernelOperands` of the innermost operator that the current thread runs, or null.
const KernelOperands*& innermost() noexcept {
    thread_local const KernelOperands* found = nullptr;
    return found;
}

bool is_in(const c10::TensorImpl& tensor, const c10::StorageImpl& storage_impl) noexcept {
    return tensor.has_storage() && tensor.unsafe_storage().unsafeGetStorageImpl() == &storage_impl;
}

}  // namespace

KernelOperands::KernelOperands(std::span<const c10::TensorImpl* const> operands) noexcept
    : first_run_(operands), innermost_(innermost()), outer_(innermost_) {
    innermost_ = this;
}

KernelOperands::KernelOperands(std::span<const StoragePtr> operands) noexcept
    : recomputed_(operands), innermost_(innermost()), outer_(innermost_) {
    innermost_ = this;
}

KernelOperands::~KernelOperands() {
    innermost_ = outer_;
}

bool KernelOperands::has(const c10::StorageImpl& storage_impl) noexcept {
    for (const KernelOperands* each = innermost(); each != nullptr; each = each->outer_) {
        if (each->reads(storage_impl)) {
            return true;
        }
    }
    return false;
}

bool KernelOperands::reads(const c10::StorageImpl& storage_impl) const noexcept {
    const auto first_run = [&](const c10::TensorImpl* each) { return is_in(*each, storage_impl); };
    const auto recomputed = [&](const StoragePtr& each) { return each.get() == &storage_impl; };
    return std::ranges::any_of(first_run_, first_run) ||
           std::ranges::any_of(recomputed_, recomputed);
}

}  // namespace rekindle
