// Protects recipes from memory that code other than PyTorch may write (R4, sources).
//
// NOTE [External writes]
//
// Scenario: an environment refills its array of observations, or a data loader its buffer. A value
// recomputed from that memory would be wrong.
//
// So an operator that reads such memory gets a recipe that reads a private copy, or no recipe at
// all. Rekindle takes whichever keeps fewer bytes, the copy or the results. A copy is reused while
// the contents stay the same. Weights are too large to copy and seldom written. Their checksum is
// noted when recipes begin to read them, and a replay raises if it has changed.
#include <cstring>
#include <memory>
#include <utility>

#include "driver.h"

namespace rekindle {

void Driver::give_away(c10::StorageImpl& home) {
    settle();
    bring_back(home);
    const Resident* found = resident_at(home);
    if (found == nullptr) {
        return;  // whichever operator reads it first registers it as foreign
    }
    Record& record = known_at(*found, home);
    const Ref<Storage> kept(&record);
    if (record.foreign) {
        return;
    }
    if (record.replayable) {
        changed_unseen(record).foreign = std::make_unique<Foreign>();
        return;
    }
    if (record.consumed()) {
        forget(record);
    }
    record.foreign = std::make_unique<Foreign>();
}

Record& Driver::changed_unseen(Record& before) {
    Recipe& call = new_call(nullptr, 0, false);
    const Ref<Call> kept(&call);
    Record& after = write_over(call, before);
    const Overwrite pair{&after.root, &before.root};
    engine.graph.overwrites(call, {&pair, 1});
    admit(call);
    return after;
}

Record* Driver::copy_still(Record& record) {
    Storage* copy = record.foreign->copy.get();
    if (copy == nullptr || !copy->resident) {
        return nullptr;
    }
    const Home now = record.at();
    const Home then = record_of(*copy).at();
    const bool same = now && then && now->nbytes() == then->nbytes() &&
                      std::memcmp(now->data(), then->data(), now->nbytes()) == 0;
    return same ? &record_of(*copy) : nullptr;
}

Record& Driver::copy_now(Record& record, Home& home) {
    make_room(record.nbytes, "a copy of memory that others may write");
    home = copy_of(record.at());
    Record& made = become_source(nullptr, home, nullptr);
    record.foreign->copy = Ref<Storage>(&made);
    return made;
}

void Driver::note_checksum(Record& record) {
    if (!record.foreign->checksum || !record.consumed()) {
        record.foreign->checksum = checksum_of(*record.at());
    }
}

// -- `torch.utils.swap_tensors` refuses tensors with weak references ------------------------------

void Driver::step_back(const c10::TensorImpl& tensor) {
    settle();
    std::erase_if(module_tensors_, [&](const ModuleTensor& each) {
        return each.tensor.lock().get() == &tensor;
    });
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        Record& record = record_of(*each);
        if (record.origin.lock().get() == &tensor) {
            record.origin = no_tensor();
            stepped_back_.emplace_back(each, const_cast<c10::TensorImpl*>(&tensor));
        }
    }
}

// The two tensors have exchanged their contents. A record follows the same tensor object as before.
void Driver::follow_again() {
    for (auto& [storage, tensor] : std::exchange(stepped_back_, {})) {
        record_of(*storage).origin = WeakTensor(
            c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(tensor)
        );
    }
}

}  // namespace rekindle
