// Limits the length of chains of recipes, in which each recipe reads a value with a recipe.
//
// NOTE [Long chains of recipes]
//
// Scenario: the state of an RNN is carried from batch to batch, or a running mean from step to
// step. Each version of the state could be recomputed from the previous one, so the recipes would
// keep every batch alive.
//
// An optimizer step ends such a chain, because it overwrites what recipes read. Without optimizer
// steps, or for values that do not depend on weights (a mean of losses), chains grow without limit.
// Then a value at the end of a long chain loses its recipe and stays in memory.
#pragma once

#include <cstdint>

#include "../../engine/engine.h"
#include "../observers/observers.h"
#include "../records/storage_record.h"
#include "../room/room.h"

namespace rekindle {

// Prunes the recipes of one budget. The caller holds the session mutex.
class History final {
public:
    History(Engine& engine, Room& room, const Observers& observers)
        : engine_(engine), room_(room), observers_(observers) {}

    // Longest permitted chain of recipes, each of which reads the result of the previous one. The
    // value at the end of a longer chain loses its recipe and stays in memory.
    std::int32_t longest_chain = 1'000;
    // Number of storages made so far at which `prune` next shortens long chains of recipes.
    std::int64_t next_check = 1'000;

    // Drop the recipes of values, such as an RNN's state, that the program carries from one
    // autograd graph to the next. Otherwise their chain of recipes would grow forever.
    void prune();

private:
    bool is_long_lived_state(StorageRecord& record) const;

    Engine& engine_;
    Room& room_;
    const Observers& observers_;
};

}  // namespace rekindle
