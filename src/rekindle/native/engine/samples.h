// Samples of memory and recomputation time over the engine's clock, buffered until Python collects
// them. rekindle.pytorch.native._steps chooses the time between samples.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "ledger.h"

namespace rekindle {

// Clock (ns), memory (bytes), recomputation time so far (ns).
using Sample = std::array<std::int64_t, 3>;

class Samples final {
public:
    // Record the memory in use and the recomputation time of `ledger`, if a sample is due. Called
    // after each operator.
    void look(const Ledger& ledger) {
        if (ledger.clock >= next_) {
            taken_.push_back({ledger.clock, ledger.memory, ledger.recompute_ns});
            next_ = ledger.clock + every_;
        }
    }

    // Return true if the buffer of samples is full, so that Python should collect it.
    bool full() const noexcept { return taken_.size() >= MOST; }

    std::vector<Sample> take() { return std::exchange(taken_, {}); }

    // Set the time of the next sample of memory (`next`), and the time between the following ones
    // (`every`).
    void space(Nanoseconds next, Nanoseconds every) noexcept {
        next_ = next;
        every_ = every;
    }

private:
    static constexpr std::size_t MOST = 1'000;

    Nanoseconds next_ = 0;
    Nanoseconds every_ = 0;
    std::vector<Sample> taken_;
};

}  // namespace rekindle
