// Checks the invariants of an engine between two events, for tests. Twin of rekindle.engine._check.
#include "ledger.h"

namespace rekindle {

const char* Ledger::fault_of(Storage& storage) const {
    std::int32_t ahead = 0;
    if (host != nullptr) {
        ahead = (host->saving.has(storage) ? 1 : 0) + (host->coming.has(storage) ? 1 : 0);
    }
    if (storage.locks != ahead) {
        return "is still locked";
    }
    if ((storage.order >= 0) != is_candidate(storage)) {
        return "is misclassified";
    }
    if (storage.references < 0) {
        return "has less than no references";
    }
    for (const Value* value = storage.first_value(); value != nullptr; value = value->next) {
        if (value->defined && !storage.resident) {
            return "is gone, its value not";
        }
        if (value->storage != &storage || value->call->count == 0) {
            return "has a value of somebody else";
        }
    }
    if (!storage.resident && !storage.consumed() && storage.dead()) {
        return "leaks";
    }
    for (const Edge* edge = storage.first_consumer; edge != nullptr; edge = edge->next) {
        if (edge->value->storage != &storage || !edge->call->replayable) {
            return "has a consumer that does not read it";
        }
    }
    bool complete = true;
    if (storage.replayable) {
        each_parent(storage, [&](const Storage& parent) { complete = complete && parent.listed; });
    }
    return complete ? nullptr : "needs what is gone";
}

std::optional<Fault> Ledger::fault_of_host() const {
    std::size_t copies = host == nullptr ? 0 : host->discarded.size();
    for (const Storage* storage = first_; storage != nullptr; storage = storage->next) {
        copies += storage->on_host ? 1 : 0;
    }
    if (host == nullptr) {
        return copies == 0 ? std::nullopt : std::optional(Fault{"copies without a host", -1});
    }
    Bytes nbytes = 0;
    for (const Storage* storage : host->copies) {
        nbytes += storage->nbytes;
        if (!storage->on_host) {
            return Fault{"has no copy", storage->id};
        }
    }
    if (copies != host->copies.size()) {
        return Fault{"copies are lost", -1};
    }
    if (nbytes != host->nbytes) {
        return Fault{"copies are miscounted", -1};
    }
    if (host->lacks(0) > 0) {
        return Fault{"the host's limit is passed", -1};
    }
    return std::nullopt;
}

std::optional<Fault> Ledger::check() {
    for (const Storage* storage : checkpoints_) {
        if (!storage->checkpoint || !storage->resident) {
            return Fault{"is a checkpoint, but not in memory", storage->id};
        }
    }
    Bytes resident = 0;
    std::size_t n_storages = 0;
    for (Storage* storage = first_; storage != nullptr; storage = storage->next) {
        resident += storage->resident ? storage->nbytes : 0;
        ++n_storages;
        if (!storage->listed || storage->dissolved || storage->count == 0) {
            return Fault{"is not in the graph", storage->id};
        }
        if (const char* what = fault_of(*storage); what != nullptr) {
            return Fault{what, storage->id};
        }
    }
    if (n_storages != n_storages_) {
        return Fault{"storages are miscounted", -1};
    }
    if (memory != resident + unlisted) {
        return Fault{"memory is miscounted", -1};
    }
    if (memory > budget) {
        return Fault{"the budget is passed", -1};
    }
    if (!freed_.empty() || !unneeded_.empty() || nesting_ != 0) {
        return Fault{"an event has not ended", -1};
    }
    return fault_of_host();
}

}  // namespace rekindle
