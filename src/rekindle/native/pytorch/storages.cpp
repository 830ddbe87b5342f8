// Storages of a driver: how they become known, what the program does with them, and when they go.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "driver.h"

namespace rekindle {

namespace {

bool is_parameter(const at::Tensor& tensor) {
    const auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
    const at::Tensor& whole =
        view != nullptr && view->has_bw_view() ? view->get_backward_view().base_ : tensor;
    return whole.requires_grad() && whole.is_leaf();
}

at::Tensor borrowed(const c10::TensorImpl& tensor) {
    return at::Tensor(
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
            const_cast<c10::TensorImpl*>(&tensor)
        )
    );
}

WeakTensor weak(const c10::TensorImpl& tensor) {
    return WeakTensor(
        c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
            const_cast<c10::TensorImpl*>(&tensor)
        )
    );
}

}  // namespace

// -- storages -------------------------------------------------------------------------------------

Recipe& Driver::new_call(const Facts* facts, Nanoseconds cost, bool replayable) {
    return recipes_.make(engine.graph, next_op_++, cost, replayable, facts);
}

Record& Driver::new_storage(Call& call, Bytes nbytes) {
    Record& made = records_.make(engine.graph, storages_made++, nbytes);
    engine.graph.makes(call, made);
    return made;
}

void Driver::admit(Recipe& call) {
    const Ref<Call> kept(&call);
    perform([&] { engine.admit(call, true); });
    for (Value* value : call.outputs()) {
        if (value->storage->replayable) {
            maybe_held(record_of(*value->storage));
        }
    }
    note_peak();
}

void Driver::account(Nanoseconds cost, Bytes nbytes) {
    engine.account(cost, nbytes);
    note_peak();
}

void Driver::note_peak() noexcept {
    look_due = look_due || engine.memory > look_above;
}

Driver::Resident* Driver::resident_at(c10::StorageImpl& home) noexcept {
    const void* address = home._mutable_data_ptr_no_checks().get();
    return address == nullptr ? nullptr : table_.find(address);
}

Record* Driver::known(const c10::TensorImpl& tensor) {
    c10::StorageImpl& home = *tensor.unsafe_storage().unsafeGetStorageImpl();
    if (home._mutable_data_ptr_no_checks().get() == nullptr) {
        return nullptr;
    }
    Resident* found = resident_at(home);
    if (found != nullptr && found->record != nullptr && found->record->foreign &&
        found->record->home.expired()) {  // it died unheard, and this took its place
        look_at_foreign();
        settle();
        found = resident_at(home);
    }
    if (found == nullptr) {
        return &adopt(tensor, home);
    }
    return found->record != nullptr ? found->record : &list(*found, tensor);
}

Bytes Driver::count(c10::StorageImpl& home, const Facts* maker) {
    const void* address = home._mutable_data_ptr_no_checks().get();
    if (address == nullptr || table_.find(address) != nullptr || !watch(home)) {
        return 0;  // memory that is not the allocator's becomes a source once somebody reads it
    }
    const auto nbytes = static_cast<Bytes>(home.nbytes());
    table_.put(address, Resident{nullptr, nbytes, maker});
    return nbytes;
}

Record& Driver::become_source(const Facts* maker, const c10::TensorImpl& tensor, Bytes nbytes) {
    Recipe& call = new_call(maker, 0, false);
    const Ref<Call> kept(&call);
    Record& made = new_storage(call, nbytes);
    made.maker = maker;
    describe(made, tensor);
    settle_in(made, Home::reclaim_copy(tensor.unsafe_storage().unsafeGetStorageImpl()));
    admit(call);
    return made;
}

// What was only counted becomes a source.
Record& Driver::list(Resident counted, const c10::TensorImpl& tensor) {
    engine.account(0, -counted.nbytes);
    return become_source(counted.maker, tensor, counted.nbytes);
}

Record& Driver::adopt(const c10::TensorImpl& tensor, c10::StorageImpl& home) {
    const auto nbytes = static_cast<Bytes>(home.nbytes());
    if (nbytes > engine.budget - engine.memory) {
        make_room(nbytes, is_parameter(borrowed(tensor)) ? "a parameter" : "a tensor of yours");
    }
    return become_source(nullptr, tensor, nbytes);
}

void Driver::describe(Record& record, const c10::TensorImpl& tensor) {
    const at::Tensor alias = borrowed(tensor);
    const auto* view = torch::autograd::impl::get_view_autograd_meta(alias);
    const bool of_whole = view != nullptr && view->has_bw_view();
    const at::Tensor& whole = of_whole ? view->get_backward_view().base_ : alias;
    record.origin = weak(*whole.unsafeGetTensorImpl());
    record.version.counter = tensor.version_counter();
    record.version.look();
    record.parameter = whole.requires_grad() && whole.is_leaf();
}

void Driver::remember(Record& record, const c10::TensorImpl& tensor) {
    record.origin = weak(tensor);
    record.version.counter = tensor.version_counter();
    record.version.look();
}

void Driver::settle_in(Record& record, const Home& home) {
    collect();  // what lived there before is dead by now, though perhaps nobody knows
    record.address = home->_mutable_data_ptr_no_checks().get();
    record.home = WeakHome(home);
    record.foreign = !watch(*home);
    if (record.address == nullptr) {
        return;  // a value of no bytes
    }
    table_.put(record.address, Resident{&record, record.nbytes, record.maker});
    if (record.foreign) {
        foreign_.emplace_back(&record);
    }
}

void Driver::succeed(Record& before, Record& after) {
    after.address = std::exchange(before.address, nullptr);
    after.home = std::exchange(before.home, no_home());
    after.owned = std::exchange(before.owned, Home());
    after.foreign = before.foreign;
    after.maker = after.maker == nullptr ? before.maker : after.maker;
    if (after.address != nullptr) {
        table_.put(after.address, Resident{&after, after.nbytes, after.maker});
        if (after.foreign) {
            foreign_.emplace_back(&after);
        }
    }
    not_held(before);
}

void Driver::hand_over(Record& before, Record& after) {
    before.successor = Ref<Storage>(&after);
    after.references += std::exchange(before.references, 0);
    if (after.references == 0) {
        after.owned.reset();
    }
}

void Driver::retain(Record& record, const Home& home) {
    if (!record.owned) {
        record.owned = home;
    }
    engine.retain(record);
}

void Driver::use(Record& record) {
    if (!record.resident) {
        poll();
    }
    perform([&] { engine.use(record.root); });
    maybe_held(record);
}

void Driver::pin(Record& record) {
    perform([&] { engine.pin(record.root); });
    if (record.consumed()) {
        own(record);
    }
    not_held(record);
}

void Driver::seal(Record& record) {
    perform([&] { engine.seal(record); });
}

void Driver::forget(Record& record) {
    poll();
    perform([&] { engine.forget(record); });
}

void Driver::resized(Record& record) {
    const Home home = record.at();
    if (!home) {
        return;
    }
    const void* address = home->_mutable_data_ptr_no_checks().get();
    if (address != record.address) {
        if (record.address != nullptr) {
            table_.take(record.address);
        }
        settle_in(record, home);
    }
    engine.resize(record, static_cast<Bytes>(home->nbytes()));
    note_peak();
}

void Driver::keep(const c10::TensorImpl& tensor) {
    settle();
    if (Record* record = known(tensor)) {
        pin(*record);
    }
}

void Driver::meet(const c10::TensorImpl& tensor) {
    if (resident_at(*tensor.unsafe_storage().unsafeGetStorageImpl()) == nullptr) {
        known(tensor);
    }
}

bool Driver::about_to_resize(const c10::TensorImpl& tensor, Bytes nbytes) {
    if (resident_at(*tensor.unsafe_storage().unsafeGetStorageImpl()) == nullptr) {
        return false;
    }
    Record& record = *known(tensor);
    const Bytes more = nbytes - record.nbytes;
    if (more < 0 && !record.replayable && record.consumed()) {
        forget(record);
    } else if (more > engine.budget - engine.memory) {
        make_room(more, "resize_");
    }
    resizing_ = Ref<Storage>(&record);
    return true;
}

void Driver::has_been_resized() {
    if (const Ref<Storage> record = std::exchange(resizing_, {}); record) {
        collect();
        resized(record_of(*record));
    }
}

void Driver::own(Record& record) {
    if (!record.owned) {
        record.owned = record.home.lock();
    }
}

void Driver::disown(Record& record) {
    const bool stays = record.pinned || !record.replayable;  // while something is made from it
    const bool needed = record.references != 0 || (record.consumed() && stays);
    if (record.held && !needed) {
        record.owned.reset();  // the program alone keeps it, or nobody
    }
    let_go_of_idle();
}

void Driver::let_go_of_idle() {
    while (!engine.idle.empty()) {
        const Ref<Storage> idle = std::move(engine.idle.back());
        engine.idle.pop_back();
        if (idle->references == 0 && !idle->consumed()) {
            record_of(*idle).owned.reset();
        }
    }
}

// -- what is carried from graph to graph (twin of rekindle.pytorch.online._history) ---------------

void Driver::forget_history() {
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

// Whether nobody waits for what else the operators made that made it.
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
