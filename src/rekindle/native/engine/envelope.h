// The greatest of many lines at a time that only moves forward, without a look at all of them. Twin
// of rekindle.policies._envelope; it chooses the same, by rows that are narrower.
//
// The benefit of letting go, bytes * (now - last) / cost, is a line in time. Lines stand in rows of
// equal width. Of each row is known which line is on top, and until when: as in a kinetic heap, the
// time at which the first steeper line of the row can overtake it. A search looks at the tops of
// all rows, and into those rows only that changed or whose time is up.
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

    // Without `moving` the benefit is bytes / cost.
    explicit Envelope(bool moving) : moving_(moving) {}

    // The slot of a new line, which counts once it is renewed.
    Slot add(double cost);
    void remove(Slot slot);
    // All but the cost of a line.
    void renew(Slot slot, double nbytes, Nanoseconds last, std::int64_t order);
    void reprice(Slot slot, double cost);
    // The slot of the line that is greatest at `now_ns`; there must be one.
    Slot best(Nanoseconds now_ns);

private:
    static constexpr std::size_t WIDTH = 64;  // near the square root of some thousand lines

    struct Row final {
        Slot top = 0;
        double until = 0;  // it stays on top
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
    std::vector<double> nbytes_;  // negative: no line in this slot
    std::vector<double> cost_;
    std::vector<double> last_;
    std::vector<std::int64_t> order_;
    std::vector<Row> rows_;
};

}  // namespace rekindle
