#include "sequence_matcher.h"

#include <algorithm>

namespace rekindle {

namespace {

// Most recorded operators in a row, all outside the autograd graph, that a running step may leave
// out.
constexpr std::size_t FAR = 64;

}  // namespace

// Match an operator that is not the expected next one, if only recorded operators outside the
// autograd graph lie between. Return its index in the recorded step, or `UNMATCHED`, or `MISMATCH`.
std::int64_t SequenceMatcher::observe_another(std::int64_t op_id) noexcept {
    if (at_ == 0) {
        return (op_id & BACKWARD) != 0 ? MISMATCH : UNMATCHED;
    }
    const std::size_t expected = next_of_graph();
    if ((op_id & GRAPH) == 0) {
        const std::int64_t found = further(op_id, at_, std::min(expected, at_ + FAR));
        return found == MISMATCH ? UNMATCHED : found;
    }
    if (expected < shape_.size()) {
        return further(op_id, expected, expected + 1);
    }
    return (op_id & BACKWARD) != 0 || op_id == shape_[0] ? MISMATCH : UNMATCHED;
}

// Return the index in the recorded step of its next operator that is part of the autograd graph, or
// the length of the step if there is none.
std::size_t SequenceMatcher::next_of_graph() const noexcept {
    std::size_t at = at_;
    while (at < shape_.size() && (shape_[at] & GRAPH) == 0) {
        ++at;
    }
    return at;
}

// Find `op_id` in the recorded step between the indices `first` and `end` (excluded), and move the
// cursor past this operator. Return its index, or `MISMATCH`.
std::int64_t SequenceMatcher::further(
    std::int64_t op_id, std::size_t first, std::size_t end
) noexcept {
    for (std::size_t found = first; found < end; ++found) {
        if (shape_[found] == op_id) {
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
    for (const std::int64_t op_id : step) {
        found.push_back(walk.observe(op_id));
        if (found.back() == MISMATCH) {
            return std::nullopt;
        }
    }
    return found;
}

bool has_shape(std::span<const std::int64_t> shape, std::span<const std::int64_t> step) {
    SequenceMatcher walk(shape);
    const auto fits = [&](std::int64_t op_id) { return walk.observe(op_id) != MISMATCH; };
    return std::ranges::all_of(step, fits) && walk.complete();
}

}  // namespace rekindle
