#include "prices.h"

#include <algorithm>
#include <utility>

#include "../base/clock.h"

namespace rekindle {

namespace {

constexpr std::size_t MOST_PENDING = 1'000;

}  // namespace

Prices::Pair::Pair(c10::intrusive_ptr<Signature> what, const c10::Stream& stream)
    : signature(std::move(what)),
      // BACKEND_DEFAULT makes a device event that measures time.
      start(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT),
      end(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT) {
    start.record(stream);
}

bool Prices::wants_more(Signature& signature) {
    while (!pending_.empty() && pending_.front().end.query()) {
        const Pair& first = pending_.front();
        const double milliseconds = first.start.elapsedTime(first.end);
        first.signature->sample(at_clock_speed(static_cast<Nanoseconds>(milliseconds * 1e6)));
        pending_.pop_front();
    }
    if (signature.cost == 0) {
        signature.cost = 1'000 + std::max<Bytes>(signature.needed, 0) / 1'000;
    }
    return pending_.size() < MOST_PENDING;
}

}  // namespace rekindle
