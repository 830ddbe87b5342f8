#include "sequence_matcher.h"

#include <algorithm>

namespace rekindle {

namespace {

// Largest number of consecutive operators outside the graph that a step may lack.
constexpr std::size_t FAR = 64;

}  // namespace

// Handle an operator that is not the next one of the shape: skip operators of the shape outside the
// graph, or return `UNMATCHED` or `MISMATCH`.
std::int64_t SequenceMatcher::meets_another(std::int64_t met) noexcept {
    if (at_ == 0) {
        return (met & BACKWARD) != 0 ? MISMATCH : UNMATCHED;
    }
    const std::size_t expected = next_of_graph();
    if ((met & GRAPH) == 0) {
        const std::int64_t found = further(met, at_, std::min(expected, at_ + FAR));
        return found == MISMATCH ? UNMATCHED : found;
    }
    if (expected < shape_.size()) {
        return further(met, expected, expected + 1);
    }
    return (met & BACKWARD) != 0 || met == shape_[0] ? MISMATCH : UNMATCHED;
}

// Return the index of the shape's next operator in the graph, or the shape's size.
std::size_t SequenceMatcher::next_of_graph() const noexcept {
    std::size_t at = at_;
    while (at < shape_.size() && (shape_[at] & GRAPH) == 0) {
        ++at;
    }
    return at;
}

// Look for `met` among the shape's indices from `first` to before `end`, and advance past it.
// Return its index, or `MISMATCH`.
std::int64_t SequenceMatcher::further(
    std::int64_t met, std::size_t first, std::size_t end
) noexcept {
    for (std::size_t found = first; found < end; ++found) {
        if (shape_[found] == met) {
            at_ = found + 1;
            return static_cast<std::int64_t>(found);
        }
    }
    return MISMATCH;
}

std::optional<std::vector<std::int64_t>> places(
    std::span<const std::int64_t> shape, std::span<const std::int64_t> step
) {
    SequenceMatcher walk(shape);
    std::vector<std::int64_t> found;
    found.reserve(step.size());
    for (const std::int64_t met : step) {
        found.push_back(walk.meets(met));
        if (found.back() == MISMATCH) {
            return std::nullopt;
        }
    }
    return found;
}

}  // namespace rekindle
