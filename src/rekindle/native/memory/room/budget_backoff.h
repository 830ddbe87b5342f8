// Lowers the budget after a device OOM, that is, after the device refused an allocation that fits
// into the budget.
//
// Other processes, operators that allocate memory internally, and fragmentation take device memory
// that no budget counts. The same allocation would fail again at the next operator, so the budget
// is lowered to the bytes that did fit on the device. If fragmentation was the cause, the device
// still has enough free bytes. So if the program cannot run within the lowered budget, the original
// budget is restored.
#pragma once

#include <algorithm>
#include <utility>

#include "../../base/types.h"

namespace rekindle {

class BudgetBackoff final {
public:
    // Return how many allocations the device refused although they fit into the budget.
    int times() const noexcept { return times_; }

    // Return how many of the allocations that the device refused still failed after Rekindle had
    // evicted values that lie next to each other in device memory.
    int by_sum() const noexcept { return by_sum_; }

    // Return the number of bytes to evict after the device refused an operator's allocation of
    // `needed` bytes, while `memory` bytes are in use. The result doubles with each call, up to
    // half of `memory`.
    Bytes step(Bytes needed, Bytes memory) noexcept {
        const Bytes half = memory / 2;
        ++by_sum_;
        const Bytes least = std::max<Bytes>(needed, 1);
        const int doubled = std::min(by_sum_, 30);
        return least > half >> doubled ? half : least << doubled;
    }

    // Record that an allocation on the device failed. Lower `budget` to `nbytes`, the bytes that
    // did fit on the device.
    void fitted(Bytes nbytes, Bytes& budget) noexcept {
        ++times_;
        if (lowers && !insists_ && nbytes < budget) {
            lowered_ += budget - nbytes;
            budget = nbytes;
        }
    }

    // Restore `budget` to its original value. Return true if it had been lowered.
    bool as_given(Bytes& budget) noexcept {
        const Bytes less = std::exchange(lowered_, 0);
        budget += less;
        return less > 0;
    }

    // Forget by how much the budget was lowered, because the program set another budget.
    void forget() noexcept { lowered_ = 0; }

    // Scope in which a device OOM does not lower the budget. Otherwise an event that is retried
    // after each lowered budget could lower and restore the budget forever.
    class ScopedNoBackoff final {
    public:
        explicit ScopedNoBackoff(BudgetBackoff& of) noexcept
            : of_(of), before_(std::exchange(of.insists_, true)) {}

        ScopedNoBackoff(const ScopedNoBackoff&) = delete;
        ScopedNoBackoff& operator=(const ScopedNoBackoff&) = delete;

        ~ScopedNoBackoff() { of_.insists_ = before_; }

    private:
        BudgetBackoff& of_;
        const bool before_;
    };

    bool lowers = true;  // a device OOM lowers the budget; false only in a test

private:
    int times_ = 0;
    int by_sum_ = 0;
    Bytes lowered_ = 0;
    bool insists_ = false;
};

}  // namespace rekindle
