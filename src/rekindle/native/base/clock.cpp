#include "clock.h"

#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>

namespace rekindle {

namespace {

constexpr std::array RANDOM_FACTORS{0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0};

// A clock of which tests choose the speed.
struct ScaledClock final {
    double factor = 1.0;
    bool is_random = false;
    std::uint64_t random = 0;  // state of the random factors
    Nanoseconds real = 0;      // time of the machine's clock at the last reading
    Nanoseconds shown = 0;     // time of this clock at the last reading
};

std::atomic<bool> is_scaled{false};
std::mutex scaled_mutex;
constinit ScaledClock scaled;  // requires `scaled_mutex`

Nanoseconds machine_ns() noexcept {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Return the processor time of this thread.
Nanoseconds thread_ns() noexcept {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return Nanoseconds{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// Return `elapsed` at the speed of the clock. Requires `scaled_mutex`.
Nanoseconds multiply(Nanoseconds elapsed) noexcept {
    double factor = scaled.factor;
    if (scaled.is_random) {
        // the linear congruential generator of Knuth's MMIX; its high bits are the random ones
        scaled.random = scaled.random * 6364136223846793005U + 1442695040888963407U;
        factor *= RANDOM_FACTORS[(scaled.random >> 33U) % RANDOM_FACTORS.size()];
    }
    return static_cast<Nanoseconds>(static_cast<double>(elapsed) * factor);
}

}  // namespace

Nanoseconds now_ns() noexcept {
    if (!is_scaled.load(std::memory_order_relaxed)) [[likely]] {
        return machine_ns();
    }
    const std::scoped_lock lock(scaled_mutex);
    const Nanoseconds real = machine_ns();
    scaled.shown += multiply(std::max<Nanoseconds>(0, real - scaled.real));
    scaled.real = real;
    return scaled.shown;
}

Nanoseconds at_clock_speed(Nanoseconds elapsed) noexcept {
    if (!is_scaled.load(std::memory_order_relaxed)) [[likely]] {
        return elapsed;
    }
    const std::scoped_lock lock(scaled_mutex);
    return multiply(elapsed);
}

void ThreadClock::start() noexcept {
    thread_ = std::this_thread::get_id();
    started_ = thread_ns();
}

Nanoseconds ThreadClock::elapsed() const noexcept {
    if (thread_ != std::this_thread::get_id()) {
        return -1;
    }
    return at_clock_speed(thread_ns() - started_);
}

void set_clock_speed(double factor, std::int64_t seed) {
    const std::scoped_lock lock(scaled_mutex);
    scaled.factor = factor;
    scaled.is_random = seed >= 0;
    scaled.random = static_cast<std::uint64_t>(seed);
    scaled.real = scaled.shown = machine_ns();
    is_scaled = true;
}

}  // namespace rekindle
