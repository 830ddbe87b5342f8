#include "sliced_call.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace rekindle {

// NOLINTNEXTLINE(misc-no-recursion): chains of sliced calls have at most `MOST_CALLS` calls
std::int64_t calls_of(const SlicedCall& call) {
    std::int64_t total = 1;
    for (const SlicedArgument& each : call.arguments) {
        total += each.call ? calls_of(*each.call) : 0;
    }
    return total;
}

// NOLINTNEXTLINE(misc-no-recursion): as above
void collect_leaves(const SlicedCall& call, std::vector<StorageRecord*>& found) {
    for (const SlicedArgument& each : call.arguments) {
        if (each.call) {
            collect_leaves(*each.call, found);
        } else if (each.leaf != nullptr && std::ranges::find(found, each.leaf) == found.end()) {
            found.push_back(each.leaf);
        }
    }
}

// NOLINTNEXTLINE(misc-no-recursion): as above
Nanoseconds cost_of(const SlicedCall& call) {
    Nanoseconds total = call.signature->cost;
    for (const SlicedArgument& each : call.arguments) {
        total += each.call ? cost_of(*each.call) : 0;
    }
    return total;
}

// NOLINTNEXTLINE(misc-no-recursion): as above
Nanoseconds time_once(const SlicedCall& call) {
    SliceTime time;
    bool has_run = false;
    {
        const std::scoped_lock lock(slices_mutex);
        has_run = call.time.elements != 0;
        time = std::exchange(call.time, SliceTime{.counted = call.time.counted || has_run});
    }
    double total = 0;
    if (has_run && !time.counted) {
        const auto whole = static_cast<double>(call.result().numel());
        total = static_cast<double>(time.spent) * whole / static_cast<double>(time.elements);
    }
    auto sum = static_cast<Nanoseconds>(total);
    for (const SlicedArgument& each : call.arguments) {
        sum += each.call ? time_once(*each.call) : 0;
    }
    return sum;
}

// NOLINTNEXTLINE(misc-no-recursion): as above
void forget_rows(const SlicedCall& call, Bytes most) {
    RowSums forgotten;  // freed without the mutex
    {
        const std::scoped_lock lock(slices_mutex);
        if (call.rows.nbytes() > most) {
            forgotten = std::exchange(call.rows, {});
        }
    }
    for (const SlicedArgument& each : call.arguments) {
        if (each.call) {
            forget_rows(*each.call, most);
        }
    }
}

}  // namespace rekindle
