// How far a step has come along a shape that is known. Twin of rekindle.pytorch.learned._walk,
// where it is explained.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace rekindle {

// Bits of what is met: whether it is of the graph, and whether it is so in a backward pass.
inline constexpr std::int64_t GRAPH = 1;
inline constexpr std::int64_t BACKWARD = 2;

// In the place of an operator of the shape: it is none, or it is of another shape.
inline constexpr std::int64_t ASIDE = -1;
inline constexpr std::int64_t LOST = -2;

// One step along `shape`, the operators of another one, which outlive it.
class Walk final {
public:
    Walk() = default;

    explicit Walk(std::span<const std::int64_t> shape, std::size_t at = 0)
        : shape_(shape), at_(at) {}

    // Which operator comes next.
    std::size_t at() const noexcept { return at_; }

    // Whether nothing of the graph is missing.
    bool complete() const noexcept { return next_of_graph() == shape_.size(); }

    // Which operator of the shape this is, or `ASIDE`, or `LOST`.
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

// For each operator of `step` which one of `shape` it is, or `ASIDE`; none if some is neither. The
// step may not be over yet.
std::optional<std::vector<std::int64_t>> places(
    std::span<const std::int64_t> shape, std::span<const std::int64_t> step
);

}  // namespace rekindle
