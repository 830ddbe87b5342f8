#include "step_order.h"

#include <algorithm>
#include <cstdlib>

#include "graph.h"

namespace rekindle {

namespace {

constexpr std::int64_t SIMILAR = 8;  // As `_SIMILAR` in Python.

}  // namespace

void StepOrder::used(Storage& storage) {
    if (place > MOST_CALLS) [[unlikely]] {
        forget();
    }
    if (!storage.uses) {
        const Key key(place, storage.nbytes);
        storage.uses = std::make_shared<Uses>();
        if (const auto same = first_.find(key); same != first_.end() && !same->second.empty()) {
            storage.uses->before = same->second.front()->before;
            storage.uses->fresh = true;
            same->second.pop_front();
        }
        first_now_[key].push_back(storage.uses);
    }
    Uses& uses = *storage.uses;
    if (uses.now.empty()) {
        used_.push_back(storage.uses);
    }
    if (uses.now.empty() || uses.now.back() != place) {
        uses.now.push_back(place);
    }
}

// Forget all uses, so that their number is limited.
void StepOrder::forget() {
    for (const std::shared_ptr<Uses>& uses : used_) {
        uses->before.clear();
        uses->now.clear();
    }
    used_.clear();
    first_.clear();
    first_now_.clear();
    place = 0;
    length_ = 0;
    known_ = false;
}

void StepOrder::step() {
    const bool alike = SIMILAR * std::abs(place - length_) <= std::max(place, length_);
    known_ = place > 0 && (alike || length_ == 0);
    length_ = std::exchange(place, 0);
    for (const std::shared_ptr<Uses>& uses : used_) {
        uses->before = std::exchange(uses->now, {});
        uses->fresh = false;
    }
    used_.clear();
    first_ = std::exchange(first_now_, {});
}

std::optional<std::int64_t> StepOrder::distance(const Storage& storage) const noexcept {
    if (!known_ || !storage.uses || storage.uses->before.empty()) {
        return std::nullopt;
    }
    const Uses& uses = *storage.uses;
    const auto at = std::ranges::lower_bound(uses.before, place);
    if (at != uses.before.end()) {
        return *at - place;
    }
    return uses.fresh ? NEVER : length_ - place + uses.before.front();
}

}  // namespace rekindle
