// Operators with `evict="anything"`: operands are restored and locked while the operator runs. Then
// its results become evictable although the program holds them.
#include "../memory/held_eviction.h"
#include "../torch/parts.h"
#include "operation.h"

namespace rekindle {

// Run the operator with its operands locked in the engine, then make its results evictable.
void Operation::run_touching() {
    StorageList storages;
    note_read(storages);
    {
        PinnedOperands touched(driver_, storages, lock_);
        if (may_let_go()) {
            about_to_let_go(driver_, lock_);
        }
        run_with_inputs();
        touched.end();
    }
    driver_.held_eviction->look_at_sources(lock_);
    let_results_return();
}

// Return true if values may have to be evicted for the operator. Then Python is asked first if
// threads that it does not know may read user-held values.
bool Operation::may_let_go() {
    const Signature& signature = *parsed_.signature;
    if (signature.needed < 0 || !signature.priced || facts_.dynamic || driver_.steps) {
        return true;
    }
    Bytes more = signature.needed + signature.workspace;
    for (std::uint32_t i = 0; i < parsed_.tensors.size(); ++i) {
        const c10::StorageImpl& storage_impl =
            *parsed_.tensors[i]->unsafe_storage().unsafeGetStorageImpl();
        const AddressEntry* found = driver_.find_by_address(storage_impl);
        if (found == nullptr) {
            more += static_cast<Bytes>(storage_impl.nbytes());
            continue;
        }
        const StorageRecord* record = found->record;
        if (record != nullptr &&
            (record->special.is_external() || (is_written(i) && record->consumed()))) {
            // The input gets a private copy, or values computed from it are recomputed. Both need
            // room.
            return true;
        }
    }
    const Engine& engine = driver_.engine;
    return more > engine.budget - engine.memory - engine.in_flight;
}

// Let results and written operands be evicted while the program holds them.
void Operation::let_results_return() {
    HeldEviction& held_eviction = *driver_.held_eviction;
    each_memory(
        torch::jit::last(stack_, facts_.returns),
        [&](std::uint32_t, const at::Tensor& tensor, bool) {
            const auto* found = driver_.find_by_address(*tensor.storage().unsafeGetStorageImpl());
            if (found != nullptr && found->record != nullptr) {
                held_eviction.made(*found->record);
            }
        }
    );
    for (const std::uint32_t position : parsed_.written) {
        if (position < inputs_.size() && inputs_[position]) {
            held_eviction.made(current(*input(position)));
        }
    }
}

}  // namespace rekindle
