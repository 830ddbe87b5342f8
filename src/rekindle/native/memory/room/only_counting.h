// The mode in which operators are only counted, because memory is far below the budget.
//
// NOTE [Only counting]
//
// Records and recipes serve evictions. A program that needs a twentieth of its budget causes none,
// so after its first few thousand operators a budget stops to make them: operators are only
// counted. Their results count against the budget, as always, but cannot be recomputed. Autograd's
// handles hold the saved tensors themselves.
//
// Nobody knows if a later step needs far more memory, and then must evict. So the mode serves what
// the program did before: it ends as soon as clearly more memory is in use than at any moment
// before, or more than a twentieth of the budget. From then on operators are recorded. Some
// thousand operators later the mode may begin again. Values that were made in the mode then stay in
// memory, but they are at most a twentieth of the budget: no more than the margin of budgets that
// Rekindle names.
//
// A counted operator has no prediction of its results' bytes. So the allocator refuses it an
// allocation beyond the twentieth. The mode then ends, and the operator runs again, recorded.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "../../base/types.h"

namespace rekindle {

// Whether a budget only counts operators. Members require the session mutex, except `on`.
class OnlyCounting final {
public:
    bool allowed = true;  // false if user-held values or a policy of the user's need records

    // The most bytes in use, at any moment before the mode and in it.
    static constexpr Bytes most(Bytes budget) noexcept { return budget / 20; }

    bool on() const noexcept { return on_.load(std::memory_order_relaxed); }

    // Return true if the mode is on or has been on.
    bool has_begun() const noexcept { return has_begun_; }

    // Count an operator after which `memory` bytes are in use. End the mode if they are too many.
    // Return true if the mode may begin now; rarely, as asking takes the caller longer.
    bool look(Bytes memory, Bytes budget) noexcept {
        ++operators_;
        if (!on()) {
            peak_ = std::max(peak_, memory);
            return operators_ % EVERY == 0 && peak_ <= most(budget);
        }
        if (memory > limit_ || memory > most(budget) || operators_ == last_) [[unlikely]] {
            end();
        }
        return false;
    }

    void begin(Bytes budget) noexcept {
        limit_ = peak_ + budget / 256;  // equal steps differ by some bytes
        has_begun_ = true;
        on_.store(true, std::memory_order_relaxed);
    }

    void end() noexcept { on_.store(false, std::memory_order_relaxed); }

    // For tests: begin now, and end after `operators` operators, or above the twentieth.
    void begin_for(std::int64_t operators) noexcept {
        last_ = operators_ + operators;
        begin(UNLIMITED);
    }

    // Return true if the cost of the next counted operator should be measured. It stands for
    // `SAMPLED` operators.
    bool samples() const noexcept { return operators_ % SAMPLED == 0; }

    static constexpr std::int64_t SAMPLED = 61;

private:
    static constexpr std::int64_t EVERY = 4096;

    std::atomic<bool> on_{false};
    bool has_begun_ = false;
    Bytes peak_ = 0;   // most bytes in use after an operator, outside of the mode
    Bytes limit_ = 0;  // bytes in use above which the mode ends
    std::int64_t operators_ = 0;
    std::int64_t last_ = -1;  // set by tests: the mode ends after this operator
};

}  // namespace rekindle
