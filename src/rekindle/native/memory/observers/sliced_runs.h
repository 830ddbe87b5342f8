// Operator calls that ran in slices, for the report of a run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../../base/types.h"
#include "../../ops/facts.h"

namespace rekindle {

// Calls of one operator that ran in slices. A call that ran again counts again.
struct SlicedRun final {
    const Facts* facts;
    std::int64_t calls = 0;
    std::int64_t slices = 0;  // the most slices of one call
    Nanoseconds time = 0;     // time of all calls, with what they computed in slices to read it
};

// All such calls, grouped by operator. The caller holds the session mutex.
class SlicedRuns final {
public:
    void add(const Facts& facts, std::int64_t slices, Nanoseconds time) {
        auto found = std::ranges::find(groups_, &facts, &SlicedRun::facts);
        if (found == groups_.end()) {
            found = groups_.insert(found, {&facts});
        }
        ++found->calls;
        found->slices = std::max(found->slices, slices);
        found->time += time;
    }

    const std::vector<SlicedRun>& groups() const noexcept { return groups_; }

private:
    std::vector<SlicedRun> groups_;
};

}  // namespace rekindle
