// The part of a budget's driver that swaps values to the host and back.
#include <utility>

#include "driver.h"
#include "swapper.h"

namespace rekindle {

// Engine action: start to copy `storage` to the host. Evict the value from device memory unless
// `keep`.
bool Driver::swap_out(Storage& storage, bool keep) {
    StorageRecord& record = record_of(storage);
    if (!events.swapper->begin(record)) {
        return false;
    }
    if (!keep) {
        observers.evictions += record.dead() ? 0 : 1;
        registry.held_list.remove(record);
        registry.vacate(record);
        events.swapper->gone(record);
    }
    return true;
}

// Engine action: read the value of `storage` from its host copy. If `early`, do not wait for the
// end of the transfer.
void Driver::swap_in(Storage& storage, bool early) {
    StorageRecord& record = record_of(storage);
    refuse_in_a_graph(record.site());
    if (const StoragePtr storage_impl = events.swapper->fetch(record, early); storage_impl) {
        registry.attach(record, storage_impl);
    } else if (!record.resident && record.on_host && !engine.swap_in_failed(record)) {
        throw SwapReadError(record.site());
    }  // null: the swap-out was cancelled, or the engine recomputes the value
}

// Engine action: free the host copy of `storage`.
void Driver::discard(Storage& storage) {
    events.swapper->discard(record_of(storage));
}

// Finish the swap-outs of storages that `call` overwrites. Then wait until the room that the engine
// made is really free on the device.
void Driver::wait_for_room(Call& call, bool in_place) {
    if (in_place) {
        for (const Overwrite& pair : call.overwrites()) {
            events.swapper->finish_swap_out(record_of(*pair.source->storage));
        }
    }
    events.swapper->wait_for(call.nbytes + engine.workspace_of(call));
}

// Engine action: recompute the outputs of the operator call `call`.
void Driver::compute(Call& call, bool in_place) {
    if (events.swapper == nullptr) {
        compute_now(call, in_place);
        return;
    }
    for (const Edge& edge : call.inputs()) {
        events.swapper->finish(record_of(*edge.value->storage));
    }
    for (const Overwrite& pair : call.overwrites()) {
        events.swapper->finish(record_of(*pair.source->storage));
    }
    wait_for_room(call, in_place);
    compute_now(call, in_place);
    for (const Value* value : call.outputs()) {
        if (is_root(*value)) {
            events.swapper->returned(record_of(*value->storage));
        }
    }
}

}  // namespace rekindle
