// Options of the engine: how it treats dead storages, when it gives up, and whether it imitates
// quirks of the authors' prototype. Twin of rekindle.engine._rules, which explains each.
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
