// Learns in which order the steps of a program use its sources, and predicts the next use of each.
// Twin of rekindle.engine._step_order, which explains the terms.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "../base/types.h"

namespace rekindle {

struct Storage;

// The places at which one storage is used in a step.
struct Uses final {
    std::vector<std::int64_t> before;  // in the last step
    std::vector<std::int64_t> now;     // in this step so far
    // The storage has begun to exist in this step, as one did in the last step.
    bool fresh = false;
};

// The uses of all sources in the last step, and in this one so far.
class StepOrder final {
public:
    // A step of more calls has no order. Scenario: a program that takes no steps of optimizers.
    static constexpr std::int64_t MOST_CALLS = std::int64_t{1} << 20;
    // Number of calls until a use that is not expected: more than any step has.
    static constexpr std::int64_t NEVER = std::int64_t{1} << 40;

    StepOrder() = default;
    StepOrder(const StepOrder&) = delete;
    StepOrder& operator=(const StepOrder&) = delete;
    ~StepOrder() = default;

    std::int64_t place = 0;  // number of calls since the step began

    // Return true if the last step tells the order of this one.
    bool known() const noexcept { return known_; }

    // Note that the program uses the source `storage` now.
    void used(Storage& storage);
    // Note that a step ends here, and the next one begins.
    void step();
    // Return the number of calls until the next use of `storage`, if it is known.
    std::optional<std::int64_t> distance(const Storage& storage) const noexcept;

private:
    void forget();

    using Key = std::pair<std::int64_t, Bytes>;  // place and size

    bool known_ = false;
    std::int64_t length_ = 0;                  // number of calls of the last step
    std::vector<std::shared_ptr<Uses>> used_;  // storages used in this step
    // Storages first used in the last step and in this one.
    std::map<Key, std::deque<std::shared_ptr<Uses>>> first_;
    std::map<Key, std::deque<std::shared_ptr<Uses>>> first_now_;
};

}  // namespace rekindle
