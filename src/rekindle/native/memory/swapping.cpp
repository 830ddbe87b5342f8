// The part of a budget's driver that swaps values to the host and back.
#include <utility>

#include "driver.h"
#include "swapper.h"

namespace rekindle {

void Driver::swap_with(const Swap& swap, _object* copies) {
    engine.swap_with(swap);
    swapper = std::make_unique<Swapper>(*this, copies);
}

// Run `events` of the engine within `Swapper::perform`, because swapping is on.
void Driver::act_swapping(c10::function_ref<void()> events) const {
    swapper->perform(events);
}

// Return true if `poll_held` must report to the engine that the program no longer holds `record`:
// autograd or, with swapping on, a recipe still needs the value. With swapping on, values in
// external memory are not reported, because plain PyTorch would read the current contents of that
// memory.
bool Driver::may_drop(const StorageRecord& record) const {
    if (swapper == nullptr) {
        return record.references != 0;
    }
    const bool wanted = !record.replayable && record.keeper && record.consumed();
    return (record.references != 0 || wanted) && !record.special.is_external();
}

// Evict values until `needed` bytes fit, and wait until the swap-outs have really freed the memory.
void Driver::make_room_and_wait(Bytes needed, const char* who) {
    evict_for(needed, who);
    while (!swapper->has_room(needed + engine.in_flight)) {
        // A swap-out failed, so its value stayed in memory. Evict other values.
        evict_for(needed, who);
    }
}

// Wait until no transfer between device and host is in flight. After that the memory of evicted
// values is really free.
void Driver::wait_for_copies() const {
    if (swapper != nullptr) {
        swapper->wait_for_all();
    }
}

// Engine action: start to copy `storage` to the host. Evict the value from device memory unless
// `keep`.
bool Driver::swap_out(Storage& storage, bool keep) {
    StorageRecord& record = record_of(storage);
    if (!swapper->begin(record)) {
        return false;
    }
    if (!keep) {
        observers.evictions += record.dead() ? 0 : 1;
        registry.held_list.remove(record);
        registry.vacate(record);
        swapper->gone(record);
    }
    return true;
}

// Engine action: read the value of `storage` from its host copy. If `early`, do not wait for the
// end of the transfer.
void Driver::swap_in(Storage& storage, bool early) {
    StorageRecord& record = record_of(storage);
    refuse_in_a_graph(record.site());
    if (const StoragePtr storage_impl = swapper->fetch(record, early); storage_impl) {
        registry.attach(record, storage_impl);
    } else if (!record.resident && record.on_host && !engine.swap_in_failed(record)) {
        throw SwapReadError(record.site());
    }  // null: the swap-out was cancelled, or the engine recomputes the value
}

// Engine action: free the host copy of `storage`.
void Driver::discard(Storage& storage) {
    swapper->discard(record_of(storage));
}

// Finish the swap-outs of storages that `call` overwrites. Then wait until the room that the engine
// made is really free on the device.
void Driver::wait_for_room(Call& call, bool in_place) {
    if (in_place) {
        for (const Overwrite& pair : call.overwrites()) {
            swapper->finish_swap_out(record_of(*pair.source->storage));
        }
    }
    swapper->wait_for(call.nbytes + engine.workspace_of(call));
}

// Engine action: recompute the outputs of the operator call `call`.
void Driver::compute(Call& call, bool in_place) {
    if (swapper == nullptr) {
        compute_now(call, in_place);
        return;
    }
    for (const Edge& edge : call.inputs()) {
        swapper->finish(record_of(*edge.value->storage));
    }
    for (const Overwrite& pair : call.overwrites()) {
        swapper->finish(record_of(*pair.source->storage));
    }
    wait_for_room(call, in_place);
    compute_now(call, in_place);
    for (const Value* value : call.outputs()) {
        if (is_root(*value)) {
            swapper->returned(record_of(*value->storage));
        }
    }
}

}  // namespace rekindle
