// Memory and time lost by the engine's clock, noted now and then until somebody takes them. How far
// apart they are is decided elsewhere (rekindle.pytorch.online._steps).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "ledger.h"

namespace rekindle {

// Clock (ns), memory (bytes) and what recomputation took so far (ns).
using Sample = std::array<std::int64_t, 3>;

class Samples final {
public:
    // A look at the clock after an operator. Notes a sample if one is due.
    void look(const Ledger& ledger) {
        if (ledger.clock >= next_) {
            taken_.push_back({ledger.clock, ledger.memory, ledger.recompute_ns});
            next_ = ledger.clock + every_;
        }
    }

    // Whether it is time that somebody took them.
    bool full() const noexcept { return taken_.size() >= MOST; }

    std::vector<Sample> take() { return std::exchange(taken_, {}); }

    // The next one is due at `next`, and others come `every` so often.
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
