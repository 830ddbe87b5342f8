// Bandwidths of the transfers to and from the host, and the times until which each direction is
// busy. Twin of `Swap` and `Ways` in rekindle.policies.swap, which explain the decisions.
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

// Both transfer directions during one run, in the engine's time.
class Ways final {
public:
    explicit Ways(const Swap& swap) noexcept
        : out_rate_(swap.out_bytes_per_s), in_rate_(swap.in_bytes_per_s) {}

    // Set the measured bandwidths; 0 leaves one unchanged.
    void measured(std::int64_t out_bytes_per_s, std::int64_t in_bytes_per_s) noexcept {
        out_rate_ = std::max<std::int64_t>(1, out_bytes_per_s != 0 ? out_bytes_per_s : out_rate_);
        in_rate_ = std::max<std::int64_t>(1, in_bytes_per_s != 0 ? in_bytes_per_s : in_rate_);
    }

    // Return the time of one transfer out, without waiting.
    Nanoseconds out_ns(Bytes nbytes) const noexcept { return takes(nbytes, out_rate_); }

    // Return the time of one transfer in, without waiting.
    Nanoseconds in_ns(Bytes nbytes) const noexcept { return takes(nbytes, in_rate_); }

    // Return true if the outgoing direction will be idle before the next call of this, judged by
    // the time since the last one.
    bool idle_out(Nanoseconds now) const noexcept { return busy_out_ - now <= now - asked_; }

    // Return true if a transfer in would begin at once.
    bool idle_in(Nanoseconds now) const noexcept { return busy_in_ <= now; }

    // Record that `idle_out` was asked now.
    void asked(Nanoseconds now) noexcept { asked_ = now; }

    // Queue a transfer out and return the time at which it ends.
    Nanoseconds send(Bytes nbytes, Nanoseconds now) noexcept {
        busy_out_ = std::max(busy_out_, now) + out_ns(nbytes);
        return busy_out_;
    }

    // Queue a transfer in.
    void fetch(Bytes nbytes, Nanoseconds now) noexcept {
        busy_in_ = std::max(busy_in_, now) + in_ns(nbytes);
    }

    // Return how long the program waits for a transfer in that it needs at once.
    Nanoseconds waiting_now(Bytes nbytes, Nanoseconds now) const noexcept {
        return std::max<Nanoseconds>(0, busy_in_ - now) + in_ns(nbytes);
    }

    // Return out(s), how long the program waits for a transfer out, for a storage of `nbytes`.
    Nanoseconds waiting_out(Bytes nbytes, Nanoseconds now) const noexcept {
        return std::max<Nanoseconds>(0, busy_out_ - now) + out_ns(nbytes);
    }

    // Return in(s), how long the program waits for a transfer in, for a storage of `nbytes` last
    // used `unused` ns ago.
    Nanoseconds waiting_in(Bytes nbytes, Bytes before, Nanoseconds unused) const noexcept {
        return std::max<Nanoseconds>(0, in_ns(nbytes + before) - unused);
    }

private:
    __extension__ using Wide = __int128;

    static constexpr std::int64_t SECOND = 1'000'000'000;
    // Leaves room to add times without overflow.
    static constexpr Nanoseconds MOST = std::int64_t{1} << 60;

    static Nanoseconds takes(Bytes nbytes, std::int64_t rate) noexcept {
        const Wide ns = (static_cast<Wide>(nbytes) * SECOND + rate - 1) / rate;
        return ns < MOST ? static_cast<Nanoseconds>(ns) : MOST;
    }

    std::int64_t out_rate_;
    std::int64_t in_rate_;
    Nanoseconds busy_out_ = 0;  // Time until which the direction is busy.
    Nanoseconds busy_in_ = 0;
    Nanoseconds asked_ = 0;
};

}  // namespace rekindle
