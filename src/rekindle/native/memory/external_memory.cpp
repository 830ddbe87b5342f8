// Protects recipes from memory that code other than PyTorch may write (R4, sources).
//
// NOTE [External writes]
//
// Scenario: an environment refills its array of observations, or a data loader its buffer. A value
// recomputed from that memory would be wrong.
//
// So the results of an operator that reads such memory get a recipe that reads a private copy of
// the memory, or no recipe. Rekindle keeps whichever is smaller, the copy or the results. A copy is
// reused while the contents stay the same. Weights are too large to copy and seldom written. Their
// checksum is noted when recipes begin to read them, and a recomputation raises if the checksum has
// changed.
#include <cstring>
#include <memory>
#include <utility>

#include "driver.h"
#include "swapper.h"

namespace rekindle {

void Driver::mark_externally_writable(c10::StorageImpl& storage_impl) {
    process_pending();
    bring_back(storage_impl);
    const AddressEntry* found = find_by_address(storage_impl);
    if (found == nullptr) {
        // The memory is not registered yet. The first operator that reads it registers it as
        // external.
        return;
    }
    StorageRecord& record = known_at(*found, storage_impl);
    const Ref<Storage> kept(&record);
    if (record.special.is_external()) {
        return;
    }
    finish_swap_out(*this, record);
    if (record.replayable) {
        record_external_write(record).special.make_external();
        return;
    }
    if (record.consumed()) {
        forget(record);
    }
    record.special.make_external();
}

StorageRecord& Driver::record_external_write(StorageRecord& before) {
    Recipe& call = new_call(nullptr, 0, false);
    const Ref<Call> kept(&call);
    StorageRecord& after = record_inplace_write(call, before);
    const Overwrite pair{&after.root, &before.root};
    engine.graph.overwrites(call, {&pair, 1});
    admit(call);
    return after;
}

StorageRecord* Driver::copy_still(StorageRecord& record) {
    Storage* copy = record.special.external()->copy.get();
    if (copy == nullptr || !copy->resident) {
        return nullptr;
    }
    const StoragePtr now = record.at();
    const StoragePtr then = record_of(*copy).at();
    const bool same = now && then && now->nbytes() == then->nbytes() &&
                      std::memcmp(now->data(), then->data(), now->nbytes()) == 0;
    return same ? &record_of(*copy) : nullptr;
}

StorageRecord& Driver::copy_now(StorageRecord& record, StoragePtr& storage_impl) {
    make_room(record.nbytes, "a copy of memory that NumPy or another process may write");
    storage_impl = copy_of(record.at());
    StorageRecord& made = make_source(nullptr, storage_impl, nullptr);
    record.special.external()->copy = Ref<Storage>(&made);
    return made;
}

void Driver::note_checksum(StorageRecord& record) {
    if (!record.special.external()->checksum || !record.consumed()) {
        record.special.external()->checksum = checksum_of(*record.at());
    }
}

// -- `torch.utils.swap_tensors` refuses tensors with weak references ------------------------------

void Driver::suspend_origin_tracking(const c10::TensorImpl& tensor) {
    process_pending();
    module_tensors_.remove(tensor);
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        StorageRecord& record = record_of(*each);
        if (record.origin.lock().get() == &tensor) {
            record.origin = no_tensor();
            tracking_suspended_.emplace_back(each, const_cast<c10::TensorImpl*>(&tensor));
        }
    }
}

// `torch.utils.swap_tensors` has exchanged the contents of two tensors. Let each record follow the
// same tensor object as before.
void Driver::resume_origin_tracking() {
    for (auto& [storage, tensor] : std::exchange(tracking_suspended_, {})) {
        record_of(*storage).origin = weak(*tensor);
    }
}

}  // namespace rekindle
