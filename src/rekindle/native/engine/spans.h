// Finds the candidates whose cost includes the cost of a given evicted storage.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "../base/types.h"

namespace rekindle {

// A range of storage ids. Ids grow in the order in which the program makes storages, so the evicted
// ancestors of a storage usually have a narrow range.
struct Span final {
    StorageId first = std::numeric_limits<StorageId>::max();
    StorageId last = std::numeric_limits<StorageId>::min();

    bool is_empty() const noexcept { return first > last; }

    void add(StorageId id) noexcept {
        first = std::min(first, id);
        last = std::max(last, id);
    }

    bool overlaps(const Span& other) const noexcept {
        return first <= other.last && other.first <= last;
    }
};

// For each candidate slot, stores the range of ids of the evicted ancestors that its cost includes.
class Spans final {
public:
    using Slot = std::int32_t;

    // Store the range of ids of `slot`. An empty range removes the stored one.
    void set(Slot slot, const Span& span);
    // Add the slots whose range of ids overlaps `span` to `found`. Return false if there are more
    // than `most`.
    bool find(const Span& span, std::size_t most, std::vector<Slot>& found) const;

private:
    std::vector<Span> spans_;
    std::vector<Slot> slots_;           // Slot of each span.
    std::vector<std::uint32_t> place_;  // Position in `spans_` for each slot, from 1; 0: none.
};

}  // namespace rekindle
