// Compares what recomputation gives with what was there the first time, for `rekindle.verify`.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "../torch/device.h"
#include "recipe.h"

namespace rekindle {

// Costs a pass over every result, the first time and each time that it is computed again.
class Audit final {
public:
    // A call that gave something else when it ran again.
    struct Difference final {
        const Facts* facts;
        OpId op;
    };

    // `call` ran for the first time; what it made is in memory.
    void made(const Recipe& call, Device& device);
    // `call` was recomputed; what is asked for is in memory.
    void made_again(const Recipe& call, Device& device);

    // Nobody will ask for it any more.
    void forget(const Storage& storage) noexcept { first_.erase(&storage); }

    const std::vector<Difference>& different() const noexcept { return different_; }

private:
    std::unordered_map<const Storage*, std::uint64_t> first_;  // checksums
    std::vector<Difference> different_;
};

}  // namespace rekindle
