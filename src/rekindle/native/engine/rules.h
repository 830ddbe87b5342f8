// How the engine treats dead storages, when it gives up, and whose mistakes it makes. Twin of
// rekindle.engine._rules, where each of them is explained.
#pragma once

#include <cstdint>

#include "../base/types.h"

namespace rekindle {

enum class Dead : std::uint8_t { evict, ignore, banish };

struct Rules final {
    Dead dead = Dead::evict;
    Nanoseconds recompute_limit = std::numeric_limits<Nanoseconds>::max();
    bool quirks = false;
};

}  // namespace rekindle
