// Finds the storage whose eviction has the greatest benefit now, without computing the benefits of
// all storages. `Benefits` in rekindle.policies._benefits computes all, and finds the same storage.
//
// The benefit of an eviction, bytes * (now - last) / cost, is a line over time, which only
// increases. Lines are the leaves of a tree whose nodes have few children. Each node stores the top
// line below it, and the time until which that line surely stays on top. As in a kinetic heap, that
// is the first time at which a steeper line can overtake it. Each node also stores a line that no
// line below it exceeds (its ceiling). A search visits only nodes below which a line changed or
// whose time is over, and whose ceiling is not below a known top. So thousands of small storages
// cost nothing while larger ones are evicted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "../base/types.h"

namespace rekindle {

// The benefits of evicting each candidate over time, as lines in numbered slots. Finds the greatest
// benefit at a given time. Among equal benefits, the line with the greatest `order` comes first.
class Envelope final {
public:
    using Slot = std::int32_t;

    // moving: benefits grow with time. Otherwise the benefit of a storage is bytes / cost.
    explicit Envelope(bool moving) : moving_(moving) {}

    // Add a line for a storage with this cost, and return its slot. Searches ignore the line until
    // the first `renew`.
    Slot add(double cost);
    void remove(Slot slot);
    // Set the bytes, last access and order of the storage whose line is in `slot`. Here and in the
    // functions below, `now_ns` must not decrease from call to call.
    void renew(Slot slot, double nbytes, Nanoseconds last, std::int64_t order, Nanoseconds now_ns);
    void reprice(Slot slot, double cost, Nanoseconds now_ns);
    // Return the slot of the line with the greatest benefit at `now_ns`. There must be at least one
    // line.
    Slot best(Nanoseconds now_ns);

private:
    static constexpr std::size_t WIDTH = 8;  // number of children of each tree node

    struct Node final {
        Slot top = 0;
        bool dirty = true;
        double until = 0;  // Time until which no other line below the node can overtake `top`.
        // Upper bound of all lines below the node (the ceiling): `height` at time `since`, and
        // `slope` more per nanosecond from then on.
        double height = std::numeric_limits<double>::infinity();
        double since = 0;
        double slope = 0;

        bool is_over(double now) const noexcept { return dirty || until <= now; }

        double ceiling(double now) const noexcept { return height + slope * (now - since); }
    };

    double benefit(std::size_t slot, double now) const noexcept {
        return moving_ ? nbytes_[slot] * (now - last_[slot]) / cost_[slot]
                       : nbytes_[slot] / cost_[slot];
    }

    bool is_above(std::size_t slot, double here, std::size_t top, double greatest) const noexcept {
        return here > greatest || (here == greatest && order_[slot] > order_[top]);
    }

    void grow();
    void change(std::size_t slot, double now);
    void find_top(std::size_t level, std::size_t index, double now);
    void find_top_line(Node& node, std::size_t first, double now) const noexcept;
    double overtakes(std::size_t slot, std::size_t top, double greatest, double now) const noexcept;
    double overtakes(double slope, double here, std::size_t top, double greatest) const noexcept;

    const bool moving_;
    std::vector<Slot> vacant_;
    std::size_t used_ = 0;
    std::vector<double> nbytes_;  // Bytes of each line's storage; negative for an empty slot.
    std::vector<double> cost_;
    std::vector<double> slope_;  // Slope of each line: bytes / cost.
    std::vector<double> last_;
    std::vector<std::int64_t> order_;
    // The levels of the tree. The nodes of the first level have the lines as children; the last
    // level is the root.
    std::vector<std::vector<Node>> levels_;
};

}  // namespace rekindle
