// Aligns the operators of a running training step with those of a recorded step. The Python class
// in rekindle.pytorch.learned._sequence_matcher does the same.
//
// A `shape` is the sequence of operators of a recorded step, as numbers (`op_id_of`). All steps of
// a shape run the same operators of the autograd graph in the same order. Other operators may be
// missing or added. For example, a data loader shuffles at the start of an epoch, or a loss is
// printed in every tenth step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace rekindle {

// Bits of an operator's number. `GRAPH`: the operator is part of the autograd graph. `BACKWARD`:
// the operator runs in a backward pass.
inline constexpr std::int64_t GRAPH = 1;
inline constexpr std::int64_t BACKWARD = 2;

// Results of `SequenceMatcher::observe` other than an index: the operator is not in the shape
// (`UNMATCHED`), or the step has another shape (`MISMATCH`).
inline constexpr std::int64_t UNMATCHED = -1;
inline constexpr std::int64_t MISMATCH = -2;

// Cursor over the operators of a recorded step (`shape`), which a running step moves on. `shape`
// must outlive this object.
class SequenceMatcher final {
public:
    SequenceMatcher() = default;

    explicit SequenceMatcher(std::span<const std::int64_t> shape, std::size_t at = 0)
        : shape_(shape), at_(at) {}

    // Return the index in the shape of the operator that is expected next.
    std::size_t at() const noexcept { return at_; }

    // Return true if every operator of the shape that is part of the autograd graph has run.
    bool complete() const noexcept { return next_of_graph() == shape_.size(); }

    // Match the next operator `op_id` of the running step. Return its index in the shape, or
    // `UNMATCHED`, or `MISMATCH`.
    std::int64_t observe(std::int64_t op_id) noexcept {
        return at_ < shape_.size() && shape_[at_] == op_id ? static_cast<std::int64_t>(at_++)
                                                           : observe_another(op_id);
    }

private:
    std::int64_t observe_another(std::int64_t op_id) noexcept;
    std::size_t next_of_graph() const noexcept;
    std::int64_t further(std::int64_t op_id, std::size_t first, std::size_t end) noexcept;

    std::span<const std::int64_t> shape_;
    std::size_t at_ = 0;
};

// Return the index in `shape` of each operator of `step`, or `UNMATCHED` for an operator that is
// not in the shape. Return none if the step has another shape. The step may be incomplete.
std::optional<std::vector<std::int64_t>> places(
    std::span<const std::int64_t> shape, std::span<const std::int64_t> step
);

}  // namespace rekindle
