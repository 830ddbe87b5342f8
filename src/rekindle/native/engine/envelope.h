// Finds the greatest of many lines at a time that only increases, without evaluating all of them.
// Twin of rekindle.policies._envelope; it finds the same line with narrower rows.
//
// The benefit of an eviction, bytes * (now - last) / cost, is a line in time. Lines are grouped
// into rows of equal width. Each row stores its top line and the time until which that line surely
// stays on top. As in a kinetic heap, that is the first time at which a steeper line of the row can
// overtake it. A search evaluates the top of each row. It rescans only rows that changed or whose
// time is over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../base/types.h"

namespace rekindle {

// Lines in numbered slots. Ties go to the line with the greatest `order`.
class Envelope final {
public:
    using Slot = std::int32_t;

    // If not `moving`, the benefit is bytes / cost.
    explicit Envelope(bool moving) : moving_(moving) {}

    // Add a line and return its slot. The line takes part after the first `renew`.
    Slot add(double cost);
    // Remove a line and free its slot.
    void remove(Slot slot);
    // Set all of a line but its cost.
    void renew(Slot slot, double nbytes, Nanoseconds last, std::int64_t order);
    // Set the cost of a line.
    void reprice(Slot slot, double cost);
    // Return the slot of the greatest line at `now_ns`. There must be at least one line.
    Slot best(Nanoseconds now_ns);

private:
    static constexpr std::size_t WIDTH = 64;  // About the square root of a few thousand lines.

    struct Row final {
        Slot top = 0;
        double until = 0;  // Time until which `top` surely stays on top.
        bool dirty = false;
    };

    double benefit(std::size_t slot, double now) const noexcept {
        return moving_ ? nbytes_[slot] * (now - last_[slot]) / cost_[slot]
                       : nbytes_[slot] / cost_[slot];
    }

    void grow();
    void find_top(Row& row, std::size_t first, double now);
    double time_on_top(std::size_t top, std::size_t first, double greatest, double now) const;

    const bool moving_;
    std::vector<Slot> vacant_;
    std::size_t used_ = 0;
    std::vector<double> nbytes_;  // Negative for an empty slot.
    std::vector<double> cost_;
    std::vector<double> last_;
    std::vector<std::int64_t> order_;
    std::vector<Row> rows_;
};

}  // namespace rekindle
