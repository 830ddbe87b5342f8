// Failures and evictions that tests can cause in a budget. Nothing here is set outside of tests.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "../../ops/facts.h"

namespace rekindle {

// Failures and evictions that tests ask for. All are off outside of tests. The caller holds the
// session mutex.
struct TestHooks final {
    bool evict_before_every_op = false;
    // Number of operators, recomputations and optimizer steps until one fails with `OutOfBudget`;
    // negative: never.
    std::int64_t refuse_in = -1;
    int interrupt_in = -1;  // number of recomputations until one fails; negative: never
    // The recomputation that a test lets fail raises before its kernel runs; false: after it.
    bool interrupt_before = false;
    bool list_recomputed_ops = false;  // list the recomputed operators in `recomputed_ops`
    std::vector<const Facts*> recomputed_ops;
    // Number of calls of this process whose results had more bytes than `most_bytes` says.
    inline static std::int64_t underestimated = 0;

    // Count one operator of the program. Return true if a test chose this one to fail with
    // `OutOfBudget`.
    bool refuses() noexcept {
        if (refuse_in < 0) [[likely]] {
            return false;
        }
        return --refuse_in < 0;
    }

    // Count one recomputation. Return true if a test chose this one to fail after its kernel; raise
    // now if the test chose that it fails before its kernel runs.
    bool interrupts() {
        const bool now = interrupt_in == 0;
        interrupt_in -= interrupt_in >= 0 ? 1 : 0;
        TORCH_CHECK(!now || !interrupt_before, "interrupted before a replay");
        return now;
    }

    // Record that the operator of `facts` was recomputed.
    void recomputed(const Facts* facts) {
        if (list_recomputed_ops) {
            recomputed_ops.push_back(facts);
        }
    }
};

}  // namespace rekindle
