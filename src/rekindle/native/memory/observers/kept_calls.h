// Operator calls whose results are never evicted, for the report of a run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../../base/types.h"
#include "../../ops/facts.h"

namespace rekindle {

// Calls of one operator whose results are never evicted, all for the same reason `why`. For
// example, the operator gave other bits when Rekindle ran it a second time on trial, or it had side
// effects.
struct KeptCalls final {
    const Facts* facts;
    std::string why;
    std::int64_t calls;
    Bytes nbytes;  // bytes of the results of these calls
};

// All such calls, grouped by operator and reason. The caller holds the session mutex.
class KeptCallsByReason final {
public:
    // Count one more call, whose results have `nbytes`.
    void add(const Facts& facts, const std::string& why, Bytes nbytes) {
        for (KeptCalls& each : groups_) {
            if (each.facts == &facts && each.why == why) {
                ++each.calls;
                each.nbytes += nbytes;
                return;
            }
        }
        groups_.push_back({&facts, why, 1, nbytes});
    }

    const std::vector<KeptCalls>& groups() const noexcept { return groups_; }

private:
    std::vector<KeptCalls> groups_;
};

}  // namespace rekindle
