// How fast values go to the host and come back, and until when the ways are busy. Twin of `Swap`
// and `Ways` in rekindle.policies.swap, where what they decide is explained.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../base/types.h"

namespace rekindle {

// Values may go to the host's memory (or a disk) and come back, beside being recomputed.
struct Swap final {
    Bytes host = UNLIMITED;
    std::int64_t out_bytes_per_s = 1;
    std::int64_t in_bytes_per_s = 1;
    bool only = false;
};

// The ways to the host and back during one run, by the clock of the engine.
class Ways final {
public:
    explicit Ways(const Swap& swap) noexcept
        : out_rate_(swap.out_bytes_per_s), in_rate_(swap.in_bytes_per_s) {}

    // What copies really took; 0: nothing new is known.
    void measured(std::int64_t out_bytes_per_s, std::int64_t in_bytes_per_s) noexcept {
        out_rate_ = std::max<std::int64_t>(1, out_bytes_per_s != 0 ? out_bytes_per_s : out_rate_);
        in_rate_ = std::max<std::int64_t>(1, in_bytes_per_s != 0 ? in_bytes_per_s : in_rate_);
    }

    // Time of one copy to the host, alone.
    Nanoseconds out_ns(Bytes nbytes) const noexcept { return takes(nbytes, out_rate_); }

    // Time of one copy back, alone.
    Nanoseconds in_ns(Bytes nbytes) const noexcept { return takes(nbytes, in_rate_); }

    // Whether the way to the host will be idle soon, judged by how often that is asked.
    bool idle_out(Nanoseconds now) const noexcept { return busy_out_ - now <= now - asked_; }

    // Whether a copy back would begin at once.
    bool idle_in(Nanoseconds now) const noexcept { return busy_in_ <= now; }

    // The next time is now.
    void asked(Nanoseconds now) noexcept { asked_ = now; }

    // A copy to the host begins as soon as it can. Returns when it ends.
    Nanoseconds send(Bytes nbytes, Nanoseconds now) noexcept {
        busy_out_ = std::max(busy_out_, now) + out_ns(nbytes);
        return busy_out_;
    }

    // A copy back begins as soon as it can.
    void fetch(Bytes nbytes, Nanoseconds now) noexcept {
        busy_in_ = std::max(busy_in_, now) + in_ns(nbytes);
    }

    // What a copy back keeps the program waiting for that wants it at once.
    Nanoseconds waiting_now(Bytes nbytes, Nanoseconds now) const noexcept {
        return std::max<Nanoseconds>(0, busy_in_ - now) + in_ns(nbytes);
    }

    // out(s) for a storage of `nbytes`.
    Nanoseconds waiting_out(Bytes nbytes, Nanoseconds now) const noexcept {
        return std::max<Nanoseconds>(0, busy_out_ - now) + out_ns(nbytes);
    }

    // in(s) for a storage of `nbytes` that was used `unused` ns ago.
    Nanoseconds waiting_in(Bytes nbytes, Bytes before, Nanoseconds unused) const noexcept {
        return std::max<Nanoseconds>(0, in_ns(nbytes + before) - unused);
    }

private:
    __extension__ using Wide = __int128;

    static constexpr std::int64_t SECOND = 1'000'000'000;
    static constexpr Nanoseconds MOST = std::int64_t{1} << 60;  // so that times can be added

    static Nanoseconds takes(Bytes nbytes, std::int64_t rate) noexcept {
        const Wide ns = (static_cast<Wide>(nbytes) * SECOND + rate - 1) / rate;
        return ns < MOST ? static_cast<Nanoseconds>(ns) : MOST;
    }

    std::int64_t out_rate_;
    std::int64_t in_rate_;
    Nanoseconds busy_out_ = 0;  // until then
    Nanoseconds busy_in_ = 0;
    Nanoseconds asked_ = 0;
};

}  // namespace rekindle
