// What the operators read that this thread runs just now.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <span>

#include "../torch/homes.h"

namespace rekindle {

// While it lives, the operands of one operator are there, and stay there. So its kernel, which may
// be written in Python, may take their addresses and give those to others: it promises that nobody
// keeps one, or writes there, but as its schema says.
class KernelOperands final {
public:
    explicit KernelOperands(std::span<const c10::TensorImpl* const> operands) noexcept;
    explicit KernelOperands(std::span<const Home> operands) noexcept;
    KernelOperands(const KernelOperands&) = delete;
    KernelOperands& operator=(const KernelOperands&) = delete;
    KernelOperands(KernelOperands&&) = delete;
    KernelOperands& operator=(KernelOperands&&) = delete;
    ~KernelOperands();

    // Whether an operator that this thread runs has an operand in `home`.
    static bool has(const c10::StorageImpl& home) noexcept;

private:
    bool reads(const c10::StorageImpl& home) const noexcept;

    const std::span<const c10::TensorImpl* const> first_run_;
    const std::span<const Home> recomputed_;
    const KernelOperands* const outer_;
};

}  // namespace rekindle
