#include "spans.h"

namespace rekindle {

void Spans::set(Slot slot, const Span& span) {
    const auto at = static_cast<std::size_t>(slot);
    if (at >= place_.size()) {
        if (span.is_empty()) {
            return;
        }
        place_.resize(at + 1);
    }
    std::uint32_t& place = place_[at];
    if (!span.is_empty()) {
        if (place == 0) {
            spans_.emplace_back();
            slots_.push_back(slot);
            place = static_cast<std::uint32_t>(spans_.size());
        }
        spans_[place - 1] = span;
    } else if (place != 0) {
        spans_[place - 1] = spans_.back();
        slots_[place - 1] = slots_.back();
        place_[static_cast<std::size_t>(slots_.back())] = place;
        place = 0;
        spans_.pop_back();
        slots_.pop_back();
    }
}

bool Spans::find(const Span& span, std::size_t most, std::vector<Slot>& found) const {
    for (std::size_t i = 0; i < spans_.size(); ++i) {
        if (spans_[i].overlaps(span)) {
            if (most-- == 0) {
                return false;
            }
            found.push_back(slots_[i]);
        }
    }
    return true;
}

}  // namespace rekindle
