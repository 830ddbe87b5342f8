#include "streams.h"

#include <algorithm>

namespace rekindle {

StreamIndex Streams::see_another(const c10::Stream& stream) {
    const auto* const found = std::ranges::find(seen_, stream);
    const auto index = static_cast<StreamIndex>(found - seen_.begin());
    if (found == seen_.end()) {
        seen_.push_back(stream);
        since_ = seen_.size() == 2 ? ++now_ : since_;
    }
    return index;
}

Bytes Streams::nbytes() const noexcept {
    constexpr std::size_t node = sizeof(decltype(orders_)::value_type) + (2 * sizeof(void*));
    return static_cast<Bytes>(
        (orders_.size() * node) + (orders_.bucket_count() * sizeof(void*)) +
        (comes_after_.capacity() * sizeof(std::uint64_t))
    );
}

// Let the stream `waiting` wait for all work that is queued on `first`.
void Streams::wait(const c10::Stream& waiting, const c10::Stream& first) {
    if (!event_) {
        event_.emplace(first.device_type());
    }
    event_->record(first);
    event_->block(waiting);
}

// Let `stream` wait for the work of `first` up to the time `until`, unless such a wait was queued
// before.
void Streams::wait_until(StreamIndex stream, StreamIndex first, std::uint64_t until) {
    if (stream < MOST && first < MOST) {
        comes_after_.resize(std::size_t{MOST} * MOST);
        std::uint64_t& after = comes_after_[(stream * MOST) + first];
        if (after >= until) {
            return;
        }
        after = now_;
    }
    wait(seen_[stream], seen_[first]);
}

void Streams::wait_for_maker(StreamIndex stream, const Order& order) {
    for (StreamIndex i = 0; i < seen_.size(); ++i) {
        if (i != stream && (order.maker == ANY_STREAM || order.maker == i)) {
            wait_until(stream, i, order.made_at);
        }
    }
}

void Streams::wait_for(StreamIndex stream, const StreamSet& others) {
    const Order order = unknown();
    for (StreamIndex i = 0; i < seen_.size(); ++i) {
        if (i != stream && others.has(i)) {
            wait_until(stream, i, order.made_at);
        }
    }
}

void Streams::wait_for_others(StreamIndex stream) {
    wait_for(stream, StreamSet::all());
}

void Streams::let_others_wait(StreamIndex stream) {
    const Order order = unknown();
    for (StreamIndex i = 0; i < seen_.size(); ++i) {
        if (i != stream) {
            wait_until(i, stream, order.made_at);
        }
    }
}

}  // namespace rekindle
