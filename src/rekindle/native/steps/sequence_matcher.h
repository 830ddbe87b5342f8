// Aligns the operators of a running training step with those of a recorded step.
//
// The `shape` of a step (not of a tensor) is the sequence of its operators, as numbers
// (`op_id_of`). A running step has the shape of a recorded step if it runs the same operators of
// the autograd graph in the same order. Other operators may be missing or added. For example, a
// data loader shuffles at the start of an epoch, or a loss is printed in every tenth step.
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

// Results of `SequenceMatcher::observe` other than an index: the recorded step does not have this
// operator here (`UNMATCHED`), or the running step has another shape (`MISMATCH`).
inline constexpr std::int64_t UNMATCHED = -1;
inline constexpr std::int64_t MISMATCH = -2;

// Cursor over the operators of a recorded step (`shape`), which a running step moves on. `shape`
// must outlive this object.
class SequenceMatcher final {
public:
    SequenceMatcher() = default;

    explicit SequenceMatcher(std::span<const std::int64_t> shape, std::size_t at = 0)
        : shape_(shape), at_(at) {}

    // Return the index in the recorded step of the operator that is expected next.
    std::size_t at() const noexcept { return at_; }

    // Return true if every recorded operator of the autograd graph has run.
    bool complete() const noexcept { return next_of_graph() == shape_.size(); }

    // Match the next operator `op_id` of the running step. Return its index in the recorded step,
    // or `UNMATCHED`, or `MISMATCH`.
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

// Return the index in `shape`, the operators of a recorded step, of each operator of `step`;
// `UNMATCHED` for an operator that the recorded step does not have. Return none if `step`, which
// may be incomplete, has another shape.
std::optional<std::vector<std::int64_t>> places(
    std::span<const std::int64_t> shape, std::span<const std::int64_t> step
);

// Return true if the operators of a finished step match those of the recorded step `shape`.
bool has_shape(std::span<const std::int64_t> shape, std::span<const std::int64_t> step);

}  // namespace rekindle
