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
#include <algorithm>
#include <vector>

#include "driver.h"

namespace rekindle {

// Drop no recipe if the whole run is recorded, because a trace has no event for a dropped recipe.
void Driver::prune_history() {
    if (observers.recorded) {
        return;
    }
    std::vector<Ref<Storage>> all;
    all.reserve(engine.n_storages());
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        record_of(*each).depth = 0;
        all.emplace_back(each);
    }
    for (const Ref<Storage>& each : all) {
        StorageRecord& record = record_of(*each);
        if (record.listed && is_long_lived_state(record)) {
            room.seal(record);
            record.depth = 0;
        }
    }
    room.release_recompute_sources();
}

// Return true if the value of `record` is a state of the program, such as an RNN's state, at the
// end of a long chain of recipes. The program holds such a value, and autograd refers to no value
// of the chain.
bool Driver::is_long_lived_state(StorageRecord& record) {
    bool in_use = false;  // autograd refers to a value of the chain of recipes
    std::int32_t deepest = 0;
    each_parent(record, [&](Storage& parent) {
        if (parent.replayable) {
            in_use = in_use || parent.references != 0 || record_of(parent).depth < 0;
            deepest = std::max(deepest, record_of(parent).depth);
        }
    });
    record.depth = in_use ? -1 : deepest + 1;
    return record.depth > longest_chain && record.resident && record.maybe_held &&
           may_forget(record);
}

}  // namespace rekindle
