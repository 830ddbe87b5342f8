#include "envelope.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>

namespace rekindle {

namespace {

// Twice the worst relative rounding error of a benefit, which is a product and a quotient of
// integers. With this margin the greatest line stays on top as long as predicted, even among lines
// that differ only by rounding errors.
constexpr double ERROR = 4 * std::numeric_limits<double>::epsilon();

constexpr double NEVER = std::numeric_limits<double>::infinity();

// Stands for the ceiling (upper bound of all lines) of a tree node whose greatest line is known.
constexpr double KNOWN = -NEVER;

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
        Node& node = levels_[level][i];
        node.dirty = node.dirty || node.top == slot;
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

// Update the tree nodes above `slot`, whose line changed. A node whose top line is still greater
// need not be searched again; only the time at which the changed line may overtake that top becomes
// earlier.
void Envelope::change(std::size_t slot, double now) {
    const double here = benefit(slot, now);
    const double slope = moving_ ? slope_[slot] : 0.0;
    // True once the line is below the top line of a node: then it is below those of all nodes
    // above.
    bool below = false;
    double until = NEVER;
    for (std::size_t level = 0, i = slot / WIDTH; level < levels_.size(); ++level, i /= WIDTH) {
        Node& node = levels_[level][i];
        if (!below && !node.is_over(now)) {
            const auto top = static_cast<std::size_t>(node.top);
            const double greatest = benefit(top, now);
            below = top != slot && here < greatest;
            if (below) {
                until = moving_ ? now + overtakes(slot, top, greatest, now) : NEVER;
                if (until == NEVER) {
                    return;
                }
            }
        }
        if (below) {
            node.until = std::min(node.until, until);
        } else {
            node.dirty = true;
        }
        const double ceiling = node.ceiling(now);
        if (here > ceiling || slope > node.slope) {
            node.height = std::max(here, ceiling);
            node.since = now;
            node.slope = std::max(slope, node.slope);
        }
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

// Find the top line of a node of the lowest level. Its children are the lines `first` to `first +
// WIDTH`.
void Envelope::find_top_line(Node& node, std::size_t first, double now) const noexcept {
    std::array<double, WIDTH> benefits{};
    std::size_t found = 0;
    for (std::size_t i = 0; i < WIDTH; ++i) {
        benefits[i] = benefit(first + i, now);
    }
    for (std::size_t i = 1; i < WIDTH; ++i) {
        if (is_above(first + i, benefits[i], first + found, benefits[found])) {
            found = i;
        }
    }
    double until = NEVER;
    double slope = 0;
    for (std::size_t i = 0; i < WIDTH && moving_; ++i) {
        until = std::min(until, now + overtakes(first + i, first + found, benefits[found], now));
        slope = std::max(slope, slope_[first + i]);
    }
    node = {static_cast<Slot>(first + found), false, until, benefits[found], now, slope};
}

// NOLINTNEXTLINE(misc-no-recursion): as deep as the tree
void Envelope::find_top(std::size_t level, std::size_t index, double now) {
    const std::size_t first = index * WIDTH;
    if (level == 0) {
        find_top_line(levels_[0][index], first, now);
        return;
    }
    const std::span below(levels_[level - 1]);
    const std::span children = below.subspan(first, std::min(WIDTH, below.size() - first));
    std::array<double, WIDTH> benefits{};  // benefits of the top lines of the node's children
    // upper bounds of the children whose top line is unknown; else `KNOWN`
    std::array<double, WIDTH> ceilings{};
    std::size_t best = 0;
    double greatest = -NEVER;
    const auto compare = [&](std::size_t i) {
        const auto line = static_cast<std::size_t>(children[i].top);
        ceilings[i] = KNOWN;
        benefits[i] = benefit(line, now);
        if (is_above(line, benefits[i], best, greatest)) {
            best = line;
            greatest = benefits[i];
        }
    };
    for (std::size_t i = 0; i < children.size(); ++i) {
        if (children[i].is_over(now)) {
            ceilings[i] = children[i].ceiling(now) * (1 + ERROR);
        } else {
            compare(i);
        }
    }
    for (;;) {
        const std::span all = std::span(ceilings).first(children.size());
        const auto highest = std::ranges::max_element(all);
        if (*highest == KNOWN || *highest < greatest) {
            break;
        }
        const auto i = static_cast<std::size_t>(highest - all.begin());
        find_top(level - 1, first + i, now);
        compare(i);
    }
    double until = NEVER;
    double slope = 0;
    for (std::size_t i = 0; i < children.size(); ++i) {
        const Node& child = children[i];
        slope = std::max(slope, child.slope);
        if (!moving_) {
            continue;
        }
        if (ceilings[i] == KNOWN) {
            const double line_slope = slope_[static_cast<std::size_t>(child.top)];
            const double overtaken = overtakes(line_slope, benefits[i], best, greatest);
            until = std::min({until, child.until, now + overtaken});
        } else {
            until = std::min(until, now + overtakes(child.slope, ceilings[i], best, greatest));
        }
    }
    levels_[level][index] = {static_cast<Slot>(best), false, until, greatest, now, slope};
}

double Envelope::overtakes(
    std::size_t slot, std::size_t top, double greatest, double now
) const noexcept {
    return overtakes(slope_[slot], benefit(slot, now), top, greatest);
}

// Return the time until a line that is at `here` and grows by `slope` overtakes the line `top`.
double Envelope::overtakes(
    double slope, double here, std::size_t top, double greatest
) const noexcept {
    if (slope <= slope_[top]) {
        return NEVER;
    }
    const double error = ERROR * std::abs(greatest);
    const double lead = std::max(greatest - here - error, 0.0);
    return lead / (slope - slope_[top] + ERROR * slope);
}

}  // namespace rekindle
