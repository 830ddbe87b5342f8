// Operators with `evict="anything"`: the operands are restored, and locked in memory while the
// operator runs. Afterwards its results may be evicted although the program holds them.
#include "../memory/held/held_eviction.h"
#include "../torch/arguments.h"
#include "../torch/parts.h"
#include "operation.h"

namespace rekindle {

// Run the operator with its operands locked in the engine.
void Operation::run_pinned() {
    StorageList storages;
    note_read(storages);
    PinnedOperands touched(
        session_.frees, *session_.held.eviction, session_.in_progress, storages, lock_
    );
    if (may_let_go()) {
        about_to_let_go(session_, lock_);
    }
    run_with_inputs();
    touched.end();
}

// Return true if running the operator may require evictions. Then the caller first asks Python
// whether threads that the runtime does not know may read user-held values.
bool Operation::may_let_go() {
    const Signature& signature = *parsed_.signature;
    if (signature.needed < 0 || !signature.priced || facts_.dynamic || session_.steps) {
        return true;
    }
    Bytes more = signature.needed + signature.workspace;
    for (std::uint32_t i = 0; i < parsed_.tensors.size(); ++i) {
        const c10::StorageImpl& storage_impl =
            *parsed_.tensors[i]->unsafe_storage().unsafeGetStorageImpl();
        const AddressEntry* found = session_.registry.find(storage_impl);
        if (found == nullptr) {
            more += static_cast<Bytes>(storage_impl.nbytes());
            continue;
        }
        const StorageRecord* record = found->record;
        if (record != nullptr &&
            (record->special.is_external() || (is_written(i) && record->consumed()))) {
            // This input gets a private copy, or values computed from it are recomputed. Both need
            // room in memory.
            return true;
        }
    }
    const Engine& engine = session_.engine;
    return more > engine.budget - engine.memory - engine.in_flight;
}

// Allow eviction of the results and of the operands that the operator wrote, although the program
// holds them.
void Operation::let_results_return() {
    HeldEviction& held_eviction = *session_.held.eviction;
    // An opaque operator may write its results after it has returned, as collectives do.
    const bool writes_later =
        held_eviction.moves() && facts_.opaque && !(facts_.is_aten && facts_.resizes);
    each_memory(returned(), [&](std::uint32_t, const at::Tensor& tensor, bool) {
        StorageRecord* record = session_.registry.find_record(*tensor.unsafeGetTensorImpl());
        if (record != nullptr && writes_later) {
            session_.held.pin_while_held(*record);
        } else if (record != nullptr) {
            held_eviction.offer(*record, *tensor.unsafeGetTensorImpl());
            held_eviction.made(*record);
        }
    });
    for (const std::uint32_t position : parsed_.written) {
        if (position < inputs_.size() && inputs_[position]) {
            held_eviction.made(current(*input(position)));
        }
    }
    if (!held_eviction.moves()) {
        return;
    }
    // The operator may have destroyed its arguments, so look up those that the program still refers
    // to.
    for (const Ref<Storage>& each : inputs_) {
        if (!each || !each->listed || each->replayable) {
            continue;
        }
        StorageRecord& record = current(record_of(*each));
        if (const auto tensor = record.origin.lock()) {
            held_eviction.offer(record, *tensor);
        }
    }
}

// Start to copy values to the host and back that will be needed there next.
void Operation::swap_ahead() {
    if (session_.room.anticipates()) {
        about_to_let_go(session_, lock_);
    }
    session_.room.swap_ahead();
}

}  // namespace rekindle
