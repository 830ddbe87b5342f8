// Options of the engine: how it treats dead storages (storages that the program cannot reach any
// more), when it gives up, and whether it imitates quirks of the DTR authors' simulator. Twin of
// rekindle.engine._rules, which explains each.
#pragma once

#include <cstdint>

#include "../base/types.h"

namespace rekindle {

// Treatment of unreferenced storages, which the program can no longer use. `evict`: evict them at
// once. `ignore`: treat them like others. `banish`: free them for good as soon as no evicted value
// needs them.
enum class Dead : std::uint8_t { evict, ignore, banish };

struct Rules final {
    Dead dead = Dead::evict;
    // Throw `Thrashed` once the total time of recomputation exceeds this.
    Nanoseconds recompute_limit = std::numeric_limits<Nanoseconds>::max();
    // Imitate the simulator of the DTR paper, to reproduce its figures.
    bool quirks = false;
};

}  // namespace rekindle
