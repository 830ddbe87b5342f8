#include "history.h"

#include <algorithm>
#include <vector>

namespace rekindle {

void History::prune() {
    if (observers_.recorded) {
        return;  // a trace has no event for a dropped recipe
    }
    std::vector<Ref<Storage>> all;
    all.reserve(engine_.n_storages());
    for (Storage* each = engine_.first_storage(); each != nullptr; each = each->next) {
        record_of(*each).depth = 0;
        all.emplace_back(each);
    }
    for (const Ref<Storage>& each : all) {
        StorageRecord& record = record_of(*each);
        if (record.listed && is_long_lived_state(record)) {
            room_.seal(record);
            record.depth = 0;
        }
    }
    room_.release_recompute_sources();
}

// Return true if the value of `record` is a state of the program, such as an RNN's state, at the
// end of a long chain of recipes. The program holds such a value, and autograd refers to no value
// of the chain.
bool History::is_long_lived_state(StorageRecord& record) const {
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
