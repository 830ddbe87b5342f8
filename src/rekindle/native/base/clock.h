// The clock with which the core measures durations.
#pragma once

#include <cstdint>
#include <thread>

#include "types.h"

namespace rekindle {

// Return the time (ns) of a clock that never goes back. Only differences have a meaning.
Nanoseconds now_ns() noexcept;

// Return a duration (ns) that another clock measured, such as a device's events, at the speed of
// `now_ns`.
Nanoseconds at_clock_speed(Nanoseconds elapsed) noexcept;

// Measures the processor time of one thread.
class ThreadClock final {
public:
    // Start the clock in this thread.
    void start() noexcept;
    // Return the processor time (ns) of this thread since `start`; -1 if another thread started the
    // clock.
    Nanoseconds elapsed() const noexcept;

private:
    std::thread::id thread_;
    Nanoseconds started_ = 0;
};

// For tests, which must pass at any speed of the machine: multiply all durations by `factor`, and
// if `seed` is not negative, by random factors from 0.1 to 10 as well.
void set_clock_speed(double factor, std::int64_t seed);

}  // namespace rekindle
