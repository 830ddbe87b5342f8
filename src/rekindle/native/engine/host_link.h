// Bandwidths of transfers to the host (swap-out) and from it (swap-in), and the times until which
// each direction is busy. Twin of `Swap` and `HostLink` in rekindle.policies.swap, which explain
// the decisions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../base/types.h"

namespace rekindle {

// Configuration of swapping: values may be copied to host memory (or a disk) instead of being
// recomputed.
struct Swap final {
    Bytes host = UNLIMITED;
    std::int64_t out_bytes_per_s = 1;
    std::int64_t in_bytes_per_s = 1;
    bool only = false;
};

// State of transfers to and from the host during one run. Times are those of the engine's clock.
class HostLink final {
public:
    explicit HostLink(const Swap& swap) noexcept
        : out_rate_(swap.out_bytes_per_s), in_rate_(swap.in_bytes_per_s) {}

    // Set the measured bandwidths of swap-out and swap-in; 0 leaves a bandwidth unchanged.
    void measured(std::int64_t out_bytes_per_s, std::int64_t in_bytes_per_s) noexcept {
        out_rate_ = std::max<std::int64_t>(1, out_bytes_per_s != 0 ? out_bytes_per_s : out_rate_);
        in_rate_ = std::max<std::int64_t>(1, in_bytes_per_s != 0 ? in_bytes_per_s : in_rate_);
    }

    // Return the duration of one swap-out, without the wait for earlier ones.
    Nanoseconds out_ns(Bytes nbytes) const noexcept { return takes(nbytes, out_rate_); }

    // Return the duration of one swap-in, without the wait for earlier ones.
    Nanoseconds in_ns(Bytes nbytes) const noexcept { return takes(nbytes, in_rate_); }

    // Return true if all queued swap-outs will probably have ended when `asked` is called next,
    // assuming that the time between its calls stays the same.
    bool idle_out(Nanoseconds now) const noexcept { return busy_out_ - now <= now - asked_; }

    // Return true if a swap-in would start at once, because none is queued.
    bool idle_in(Nanoseconds now) const noexcept { return busy_in_ <= now; }

    // Record that the engine called `idle_out` at the time `now`.
    void asked(Nanoseconds now) noexcept { asked_ = now; }

    // Add a swap-out of `nbytes` to the queue. Return the time at which it will end.
    Nanoseconds send(Bytes nbytes, Nanoseconds now) noexcept {
        busy_out_ = std::max(busy_out_, now) + out_ns(nbytes);
        return busy_out_;
    }

    // Add a swap-in of `nbytes` to the queue.
    void fetch(Bytes nbytes, Nanoseconds now) noexcept {
        busy_in_ = std::max(busy_in_, now) + in_ns(nbytes);
    }

    // Return how long the program waits for a swap-in of `nbytes` that it needs at once.
    Nanoseconds waiting_now(Bytes nbytes, Nanoseconds now) const noexcept {
        return std::max<Nanoseconds>(0, busy_in_ - now) + in_ns(nbytes);
    }

    // Return how long the program waits for a swap-out of `nbytes`; out(s) in
    // rekindle.policies.swap.
    Nanoseconds waiting_out(Bytes nbytes, Nanoseconds now) const noexcept {
        return std::max<Nanoseconds>(0, busy_out_ - now) + out_ns(nbytes);
    }

    // Return how long the program waits for a swap-in of `nbytes` that were last used `unused` ns
    // ago; in(s) in rekindle.policies.swap. `before`: bytes that are swapped in earlier.
    Nanoseconds waiting_in(Bytes nbytes, Bytes before, Nanoseconds unused) const noexcept {
        return std::max<Nanoseconds>(0, in_ns(nbytes + before) - unused);
    }

private:
    __extension__ using Wide = __int128;

    static constexpr std::int64_t SECOND = 1'000'000'000;
    // Upper bound of a duration. Sums of such durations do not overflow.
    static constexpr Nanoseconds MOST = std::int64_t{1} << 60;

    static Nanoseconds takes(Bytes nbytes, std::int64_t rate) noexcept {
        const Wide ns = (static_cast<Wide>(nbytes) * SECOND + rate - 1) / rate;
        return ns < MOST ? static_cast<Nanoseconds>(ns) : MOST;
    }

    std::int64_t out_rate_;
    std::int64_t in_rate_;
    Nanoseconds busy_out_ = 0;  // time at which the last queued swap-out will end
    Nanoseconds busy_in_ = 0;
    Nanoseconds asked_ = 0;
};

}  // namespace rekindle
