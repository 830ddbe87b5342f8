// Records the operands of the operators that the current thread runs, so that these operands are
// not evicted.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <span>

#include "../torch/storage_ptr.h"

namespace rekindle {

// Scope in which the operands of one operator stay in memory. The operator's kernel may be written
// in Python and may pass addresses of its operands to other code. The author of the kernel must
// ensure that no address is used after the operator returns, and that the schema declares all
// writes.
class KernelOperands final {
public:
    explicit KernelOperands(std::span<const c10::TensorImpl* const> operands) noexcept;
    explicit KernelOperands(std::span<const StoragePtr> operands) noexcept;
    KernelOperands(const KernelOperands&) = delete;
    KernelOperands& operator=(const KernelOperands&) = delete;
    ~KernelOperands();

    // Return true if an operator that the current thread runs has an operand in `storage_impl`.
    static bool has(const c10::StorageImpl& storage_impl) noexcept;

private:
    bool reads(const c10::StorageImpl& storage_impl) const noexcept;

    const std::span<const c10::TensorImpl* const> first_run_;
    const std::span<const StoragePtr> recomputed_;
    const KernelOperands*& innermost_;  // of this thread
    const KernelOperands* const outer_;
};

}  // namespace rekindle
