#include "envelope.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace rekindle {

namespace {

// Twice the worst relative error of a benefit, which is a product and a quotient of integers. A
// line predicted to stay on top then really does, even among lines that are equal but for rounding.
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
    last_.resize(slots, -1.0);
    order_.resize(slots, -1);
    vacant_.reserve(slots);
    rows_.push_back({static_cast<Slot>(slots - WIDTH), NEVER, true});
}

void Envelope::remove(Slot slot) {
    cost_[static_cast<std::size_t>(slot)] = 1.0;
    renew(slot, -1.0, -1, -1);
    vacant_.push_back(slot);
}

void Envelope::renew(Slot slot, double nbytes, Nanoseconds last, std::int64_t order) {
    const auto at = static_cast<std::size_t>(slot);
    nbytes_[at] = nbytes;
    last_[at] = static_cast<double>(last);
    order_[at] = order;
    rows_[at / WIDTH].dirty = true;
}

void Envelope::reprice(Slot slot, double cost) {
    const auto at = static_cast<std::size_t>(slot);
    cost_[at] = cost;
    rows_[at / WIDTH].dirty = true;
}

Envelope::Slot Envelope::best(Nanoseconds now_ns) {
    const auto now = static_cast<double>(now_ns);
    double greatest = -NEVER;
    Slot found = 0;
    for (std::size_t i = 0; i < rows_.size(); ++i) {
        Row& row = rows_[i];
        if (row.dirty || row.until <= now) {
            find_top(row, i * WIDTH, now);
        }
        const auto top = static_cast<std::size_t>(row.top);
        const double here = benefit(top, now);
        if (here > greatest ||
            (here == greatest && order_[top] > order_[static_cast<std::size_t>(found)])) {
            greatest = here;
            found = row.top;
        }
    }
    return found;
}

// Find the top line of a row, and the time until which it stays on top.
void Envelope::find_top(Row& row, std::size_t first, double now) {
    std::array<double, WIDTH> benefits;
    for (std::size_t i = 0; i < WIDTH; ++i) {
        benefits[i] = benefit(first + i, now);
    }
    double greatest = benefits[0];
    for (const double each : benefits) {
        greatest = std::max(greatest, each);
    }
    std::int64_t order = -2;
    std::size_t top = first;
    for (std::size_t i = 0; i < WIDTH; ++i) {
        if (benefits[i] == greatest && order_[first + i] > order) {
            order = order_[first + i];
            top = first + i;
        }
    }
    row.top = static_cast<Slot>(top);
    row.dirty = false;
    row.until = moving_ ? time_on_top(top, first, greatest, now) : NEVER;
}

// Return the earliest time at which a steeper line of the row can overtake `top`.
double Envelope::time_on_top(
    std::size_t top, std::size_t first, double greatest, double now
) const {
    const double slope_of_top = nbytes_[top] / cost_[top];
    const double error = ERROR * std::abs(greatest);
    double least = NEVER;
    for (std::size_t i = first; i < first + WIDTH; ++i) {
        const double slope = nbytes_[i] / cost_[i];
        if (slope > slope_of_top) {
            const double lead = std::max(greatest - benefit(i, now) - error, 0.0);
            const double gain = slope - slope_of_top + ERROR * slope;
            least = std::min(least, lead / gain);
        }
    }
    return now + least;
}

}  // namespace rekindle
