#include "envelope.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace rekindle {

namespace {

// Twice the worst relative rounding error of a benefit, which is a product and a quotient of
// integers. With this margin, a line stays on top as long as predicted, even among lines that
// differ only by rounding.
constexpr double ERROR = 4 * std::numeric_limits<double>::epsilon();

constexpr double NEVER = std::numeric_limits<double>::infinity();

}  // namespace

Envelope::Slot Envelope::add(double cost) {
    Slot slot = 0;
    if (!vacant_.empty()) {
        slot = vacant_.back();
        vacant_.pop_back();
    } else {
        if (used_ == nbytes_.size()) {
            grow();
        }
        slot = static_cast<Slot>(used_++);
    }
    cost_[static_cast<std::size_t>(slot)] = cost;
    return slot;
}

void Envelope::grow() {
    const std::size_t slots = nbytes_.size() + WIDTH;
    nbytes_.resize(slots, -1.0);
    cost_.resize(slots, 1.0);
    slope_.resize(slots, -1.0);
    last_.resize(slots, -1.0);
    order_.resize(slots, -1);
    vacant_.reserve(slots);
    std::size_t below = slots;
    for (std::size_t level = 0; below > 1; ++level) {
        below = (below + WIDTH - 1) / WIDTH;
        if (level == levels_.size()) {
            levels_.emplace_back();
        }
        levels_[level].resize(below);
        levels_[level].back().dirty = true;
    }
}

void Envelope::remove(Slot slot) {
    const auto at = static_cast<std::size_t>(slot);
    nbytes_[at] = slope_[at] = last_[at] = -1.0;
    cost_[at] = 1.0;
    order_[at] = -1;
    for (std::size_t level = 0, i = at / WIDTH; level < levels_.size(); ++level, i /= WIDTH) {
        if (levels_[level][i].top == slot) {
            mark(at, level);
            break;
        }
    }
    vacant_.push_back(slot);
}

void Envelope::renew(
    Slot slot, double nbytes, Nanoseconds last, std::int64_t order, Nanoseconds now_ns
) {
    const auto at = static_cast<std::size_t>(slot);
    nbytes_[at] = nbytes;
    slope_[at] = nbytes / cost_[at];
    last_[at] = static_cast<double>(last);
    order_[at] = order;
    change(at, static_cast<double>(now_ns));
}

void Envelope::reprice(Slot slot, double cost, Nanoseconds now_ns) {
    const auto at = static_cast<std::size_t>(slot);
    cost_[at] = cost;
    slope_[at] = nbytes_[at] / cost;
    change(at, static_cast<double>(now_ns));
}

// The line in `slot` changed. A node whose top line is still greater need not be searched again;
// only the time at which the changed line may overtake that top becomes earlier.
void Envelope::change(std::size_t slot, double now) {
    double until = NEVER;
    const double here = benefit(slot, now);
    for (std::size_t level = 0, i = slot / WIDTH; level < levels_.size(); ++level, i /= WIDTH) {
        Node& node = levels_[level][i];
        const auto top = static_cast<std::size_t>(node.top);
        if (until == NEVER) {
            const double greatest = benefit(top, now);
            if (node.is_over(now) || top == slot || here >= greatest) {
                mark(slot, level);
                return;
            }
            until = moving_ ? now + overtakes(slot, top, greatest, now) : NEVER;
            if (until == NEVER) {
                return;
            }
        }
        node.until = std::min(node.until, until);
    }
}

// Let the next search visit all nodes above the line in `slot`, from `level` on.
void Envelope::mark(std::size_t slot, std::size_t level) noexcept {
    std::size_t i = slot / WIDTH;
    for (std::size_t below = 0; below < level; ++below) {
        i /= WIDTH;
    }
    for (; level < levels_.size(); ++level, i /= WIDTH) {
        levels_[level][i].dirty = true;
    }
}

Envelope::Slot Envelope::best(Nanoseconds now_ns) {
    const auto now = static_cast<double>(now_ns);
    const Node& root = levels_.back().front();
    if (root.is_over(now)) {
        find_top(levels_.size() - 1, 0, now);
    }
    return root.top;
}

// NOLINTNEXTLINE(misc-no-recursion): as deep as the tree
void Envelope::find_top(std::size_t level, std::size_t index, double now) {
    const std::size_t first = index * WIDTH;
    std::array<std::size_t, WIDTH> tops{};
    std::array<double, WIDTH> benefits{};
    std::size_t count = WIDTH;
    double until = NEVER;
    if (level == 0) {
        for (std::size_t i = 0; i < WIDTH; ++i) {
            tops[i] = first + i;
        }
    } else {
        const std::vector<Node>& below = levels_[level - 1];
        count = std::min(WIDTH, below.size() - first);
        for (std::size_t i = 0; i < count; ++i) {
            const Node& child = below[first + i];
            if (child.is_over(now)) {
                find_top(level - 1, first + i, now);
            }
            tops[i] = static_cast<std::size_t>(child.top);
            until = std::min(until, child.until);
        }
    }
    std::size_t found = 0;
    for (std::size_t i = 0; i < count; ++i) {
        benefits[i] = benefit(tops[i], now);
        if (is_above(tops[i], benefits[i], tops[found], benefits[found])) {
            found = i;
        }
    }
    Node& node = levels_[level][index];
    node.top = static_cast<Slot>(tops[found]);
    node.dirty = false;
    for (std::size_t i = 0; i < count && moving_; ++i) {
        until = std::min(until, now + overtakes(tops[i], tops[found], benefits[found], now));
    }
    node.until = until;
}

double Envelope::overtakes(
    std::size_t slot, std::size_t top, double greatest, double now
) const noexcept {
    const double slope = slope_[slot];
    if (slope <= slope_[top]) {
        return NEVER;
    }
    const double error = ERROR * std::abs(greatest);
    const double lead = std::max(greatest - benefit(slot, now) - error, 0.0);
    return lead / (slope - slope_[top] + ERROR * slope);
}

}  // namespace rekindle
