// Aligns a running step with a recorded one, operator by operator. Twin of
// rekindle.pytorch.learned._sequence_matcher.
//
// A `shape` is the sequence of operators of a recorded step. Operators in the autograd graph come
// in the same order in all steps of a shape. Others may be missing or added: a data loader shuffles
// at the start of an epoch, or a loss is printed now and then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace rekindle {

// Bits of an operator's number: it is part of the autograd graph; it runs in a backward pass.
inline constexpr std::int64_t GRAPH = 1;
inline constexpr std::int64_t BACKWARD = 2;

// Results of `SequenceMatcher::meets` instead of an index: the operator is not part of the shape
// (`UNMATCHED`), or the step has another shape (`MISMATCH`).
inline constexpr std::int64_t UNMATCHED = -1;
inline constexpr std::int64_t MISMATCH = -2;

// Position of a running step in `shape`, which must outlive it.
class SequenceMatcher final {
public:
    SequenceMatcher() = default;

    explicit SequenceMatcher(std::span<const std::int64_t> shape, std::size_t at = 0)
        : shape_(shape), at_(at) {}

    // Return the index of the operator that is expected next.
    std::size_t at() const noexcept { return at_; }

    // Return true if every operator of the graph has come.
    bool complete() const noexcept { return next_of_graph() == shape_.size(); }

    // Return the index in the shape of the operator `met`, or `UNMATCHED`, or `MISMATCH`.
    std::int64_t meets(std::int64_t met) noexcept {
        return at_ < shape_.size() && shape_[at_] == met ? static_cast<std::int64_t>(at_++)
                                                         : meets_another(met);
    }

private:
    std::int64_t meets_another(std::int64_t met) noexcept;
    std::size_t next_of_graph() const noexcept;
    std::int64_t further(std::int64_t met, std::size_t first, std::size_t end) noexcept;

    std::span<const std::int64_t> shape_;
    std::size_t at_ = 0;
};

// Return the index in `shape` of each operator of `step`, or `UNMATCHED`. Return none if the step
// has another shape. The step may be incomplete.
std::optional<std::vector<std::int64_t>> places(
    std::span<const std::int64_t> shape, std::span<const std::int64_t> step
);

}  // namespace rekindle
