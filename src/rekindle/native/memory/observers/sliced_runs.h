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

    // The first run of a call took `time`, and `once` (`time_once`) without repetitions. The engine
    // counts `cost` for it.
    void count(Nanoseconds time, Nanoseconds once, Nanoseconds cost) noexcept {
        recompute_ns_ += std::max<Nanoseconds>(0, time - once);
        compute_ns_ += std::min(time, once) - cost;
    }

    const std::vector<SlicedRun>& groups() const noexcept { return groups_; }

    // What to add to the engine's time of first runs, and to that of recomputations: what a call
    // reads in slices is often computed for each slice, and once more for the next reader.
    Nanoseconds compute_ns() const noexcept { return compute_ns_; }

    Nanoseconds recompute_ns() const noexcept { return recompute_ns_; }

private:
    std::vector<SlicedRun> groups_;
    Nanoseconds compute_ns_ = 0;
    Nanoseconds recompute_ns_ = 0;
};

}  // namespace rekindle
