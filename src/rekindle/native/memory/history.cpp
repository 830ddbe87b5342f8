// How far back recipes reach: what a program carries along does not carry along all it was.
//
// An RNN's state goes from batch to batch, a running mean from step to step. Each could be computed
// again from the one before, and so from everything that ever was. An optimizer's step ends that,
// for it writes over what recipes read; where none comes, or where they read something else (a mean
// of losses), it ends here, and the value stays instead.
#include <algorithm>
#include <vector>

#include "driver.h"

namespace rekindle {

// A trace cannot say until when something could be computed again: in a run that is recorded
// nothing is forgotten.
void Driver::forget_history() {
    if (recorded) {
        return;
    }
    std::vector<Ref<Storage>> all;
    all.reserve(engine.n_storages());
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        record_of(*each).depth = 0;
        all.emplace_back(each);
    }
    for (const Ref<Storage>& each : all) {
        Record& record = record_of(*each);
        if (record.listed && carried_along(record)) {
            seal(record);
            record.depth = 0;
        }
    }
    forget_sources();
}

bool Driver::forget_sources() {
    if (recorded) {
        return false;
    }
    const Bytes before = engine.memory;
    std::vector<Ref<Storage>> found;
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        const bool source = each->consumed() && each->resident && !each->replayable;
        if (source && each->references == 0 && !record_of(*each).is_held()) {
            engine.graph.ends(*each, found);
        }
    }
    for (const Ref<Storage>& each : found) {
        Record& record = record_of(*each);
        if (record.listed && record.replayable && may_forget(record)) {
            seal(record);
        }
    }
    let_go_of_idle();
    settle();
    return engine.memory < before;
}

// Whether the program holds it at the end of a long chain of which autograd asks for nothing.
bool Driver::carried_along(Record& record) {
    bool in_use = false;  // something that it is made from is asked for
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

bool Driver::may_forget(Record& record) {
    bool may = true;
    each_maker(record, [&](Call& call) {
        for (const Value* value : call.outputs()) {
            const Storage& made = *value->storage;
            may = may && (made.resident || (made.dead() && !made.consumed()));
        }
    });
    return may;
}

}  // namespace rekindle
