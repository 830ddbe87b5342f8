// Memory that others than PyTorch may write without a word is the input of no recipe (R4).
//
// An environment fills its array of observations again, a loader its buffer; what was computed from
// them would be computed from something else. So an operator that reads such memory has a recipe
// with a private copy of it, or none: whichever keeps fewer bytes, its results or the copy. A copy
// serves for as long as what it is of has not changed. Weights are too large for that and seldom
// written: their checksum is taken when recipes begin to read them, and has to be the same when one
// runs again.
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
        return;  // who reads it first will see whose it is
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

// -- `torch.utils.swap_tensors` refuses tensors that somebody has weak pointers to ----------------

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

// The tensors are in each other's place, with all that they are: who followed one still does.
void Driver::follow_again() {
    for (auto& [storage, tensor] : std::exchange(stepped_back_, {})) {
        record_of(*storage).origin = WeakTensor(
            c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(tensor)
        );
    }
}

}  // namespace rekindle
