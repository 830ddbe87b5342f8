// The mode in which operators are only counted, because memory is far below the budget.
//
// NOTE [Only counting]
//
// Records and recipes serve evictions. A program that needs an eighth of its budget causes none, so
// after its first few thousand operators a budget stops to make them: operators are only counted.
// Their results count against the budget, as always, but cannot be recomputed. Autograd's handles
// hold the saved tensors themselves. The mode ends for good when memory exceeds a quarter of the
// budget. Values that were made in the mode then stay in memory, and everything else has the other
// three quarters.
//
// A counted operator has no prediction of its results' bytes. So the allocator refuses it an
// allocation of more than a quarter of the budget. The mode then ends, and the operator runs again,
// with a prediction.
#pragma once

#include <atomic>
#include <cstdint>

#include "../base/types.h"

namespace rekindle {

// Whether a budget only counts operators. Members require the session mutex, except `on`.
class OnlyCounting final {
public:
    // Largest peak (bytes) of a program whose operators are only counted.
    static constexpr Bytes most_at_begin(Bytes budget) noexcept { return budget / 8; }

    // Bytes in use above which the mode ends. No operator allocates more at once in the mode.
    static constexpr Bytes most(Bytes budget) noexcept { return budget / 4; }

    bool on() const noexcept { return on_.load(std::memory_order_relaxed); }

    // Return true if the mode was on and has ended.
    bool was_on() const noexcept { return was_on_ && !on(); }

    // Count an operator after which `memory` bytes are in use. End the mode if they are too many.
    // Return true if the mode may begin now; rarely, as asking takes the caller longer.
    bool look(Bytes memory, Bytes budget) noexcept {
        ++operators_;
        if (!on()) {
            return !ended_ && operators_ % EVERY == 0;
        }
        if (memory > most(budget) || operators_ == last_) [[unlikely]] {
            end();
        }
        return false;
    }

    void begin() noexcept {
        was_on_ = true;
        on_.store(true, std::memory_order_relaxed);
    }

    // End the mode for good, also if it has not begun yet.
    void end() noexcept {
        ended_ = true;
        on_.store(false, std::memory_order_relaxed);
    }

    // For tests: begin now, and end after `operators` operators.
    void begin_for(std::int64_t operators) noexcept {
        last_ = operators_ + operators;
        begin();
    }

    // Return true if the cost of the next counted operator should be measured. It stands for
    // `SAMPLED` operators.
    bool samples() const noexcept { return operators_ % SAMPLED == 0; }

    static constexpr std::int64_t SAMPLED = 61;

private:
    static constexpr std::int64_t EVERY = 4096;

    std::atomic<bool> on_{false};
    bool was_on_ = false;
    bool ended_ = false;  // the mode does not begin again
    std::int64_t operators_ = 0;
    std::int64_t last_ = -1;  // set by tests: the mode ends after this operator
};

}  // namespace rekindle
