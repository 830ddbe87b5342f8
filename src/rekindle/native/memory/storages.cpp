// Storages of a driver: how they are registered, used and freed.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "../ops/signature.h"
#include "../torch/geometry.h"
#include "../torch/homes.h"
#include "audit.h"
#include "driver.h"
#include "swapper.h"

namespace rekindle {

namespace {

Home home_of(const c10::TensorImpl& tensor) {
    return Home::reclaim_copy(tensor.unsafe_storage().unsafeGetStorageImpl());
}

}  // namespace

// -- storages -------------------------------------------------------------------------------------

void Driver::open() {
    if (device.queues()) {
        Recipe& call = new_call(nullptr, 0, false);
        const Ref<Call> kept(&call);
        outside_ = Ref<Storage>(&new_storage(call, device.allocated()));
        admit(call);
    }
}

bool Driver::counts(const c10::StorageImpl& home) {
    const c10::Device there = home.device();
    const c10::Device here = device.which();
    const bool same = there.is_cpu() ? here.is_cpu() : there == here;
    if (devices_met_.empty() || devices_met_.front() != there) {
        if (std::ranges::find(devices_met_, there) == devices_met_.end()) {
            devices_met_.push_back(there);
        }
        if (assumed_ && !same && !there.is_cpu()) {
            throw Elsewhere(there);
        }
    }
    return same;
}

Bytes Driver::counted(const c10::StorageImpl& home) {
    return counts(home) ? device.rounded(static_cast<Bytes>(home.nbytes())) : 0;
}

Recipe& Driver::new_call(const Facts* facts, Nanoseconds cost, bool replayable) {
    places_due = notes_places;
    return recipes_.make(engine.graph, next_op_++, cost, replayable, facts);
}

Record& Driver::new_storage(Call& call, Bytes nbytes) {
    Record& made = records_.make(engine.graph, storages_made++, nbytes);
    made.order = device.streams.unknown();
    engine.graph.makes(call, made);
    return made;
}

void Driver::admit(Recipe& call, Bytes workspace) {
    const Ref<Call> kept(&call);
    if (workspace != 0) {
        if (call.aside == nullptr) {
            call.aside = std::make_unique<Recipe::Aside>();
        }
        call.aside->workspace = workspace;
        call.has_workspace = true;
    }
    if (transcriber.writes()) {
        transcriber.called(call.name(), workspace);
    }
    perform([&] { engine.admit(call, true); });
    for (Value* value : call.outputs()) {
        if (value->storage->replayable || swapper != nullptr) {
            maybe_held(record_of(*value->storage));
        }
    }
    if (steps) {
        steps->made(call);
    }
    if (audit) {
        audit->made(call, device);
    }
    note_memory();
}

void Driver::note_kept(const Facts& facts, const std::string& why, Bytes nbytes) {
    for (Kept& each : kept_calls) {
        if (each.facts == &facts && each.why == why) {
            ++each.calls;
            each.nbytes += nbytes;
            return;
        }
    }
    kept_calls.push_back({&facts, why, 1, nbytes});
}

void Driver::account(const Facts& facts, Nanoseconds cost, Bytes workspace) {
    if (transcriber.writes()) {
        Recipe& call = new_call(&facts, cost, false);
        const Ref<Call> kept(&call);
        admit(call, workspace);
    } else {
        count(cost, 0, workspace);
    }
}

void Driver::count(Nanoseconds cost, Bytes nbytes, Bytes workspace) {
    engine.account(cost, nbytes, workspace);
    note_memory();
}

// Note the memory in use for samples and peaks; called after every change by an operator.
void Driver::note_memory() {
    peak_snapshot_due = peak_snapshot_due || engine.memory > peak_threshold_;
    samples.look(engine);
    samples_due = samples.full();
}

Driver::Resident* Driver::resident_at(const c10::StorageImpl& home) noexcept {
    const void* address = address_of(home);
    return address == nullptr ? nullptr : table_.find(address);
}

Record* Driver::known(const c10::TensorImpl& tensor) {
    c10::StorageImpl& home = *tensor.unsafe_storage().unsafeGetStorageImpl();
    if (address_of(home) == nullptr) {
        return nullptr;
    }
    Resident* found = resident_at(home);
    if (found != nullptr && found->record != nullptr && found->record->unheard &&
        found->record->home.expired()) {
        // It died without notice, and this storage took its address.
        look_at_unheard();
        settle();
        found = resident_at(home);
    }
    if (found == nullptr) {
        return &adopt(tensor, home);
    }
    return found->record != nullptr ? found->record : &list(*found, home_of(tensor), &tensor);
}

// Return the record of an entry, which becomes a source if it was only counted.
Record& Driver::known_at(Resident found, c10::StorageImpl& home) {
    return found.record != nullptr ? *found.record
                                   : list(found, Home::reclaim_copy(&home), nullptr);
}

Bytes Driver::count(c10::StorageImpl& home, const Facts* maker) {
    const void* address = address_of(home);
    const bool on_cpu = home.device_type() == c10::DeviceType::CPU;
    if (address == nullptr || table_.find(address) != nullptr || (on_cpu && !watch(home))) {
        // Memory of another allocator becomes a source when an operator reads it.
        return 0;
    }
    const Bytes nbytes = counted(home);
    settle_at(address, nullptr, nbytes, maker, on_cpu ? nullptr : &home);
    if (!on_cpu) {
        unheard_.push_back({address, WeakHome(Home::reclaim_copy(&home))});
    }
    return nbytes;
}

// Register the memory in `home` as a source. `maker` is null if no operator of the program made it.
Record& Driver::become_source(const Facts* maker, const Home& home, const c10::TensorImpl* tensor) {
    Recipe& call = new_call(maker, 0, false);
    const Ref<Call> kept(&call);
    Record& made = new_storage(call, counted(*home));
    made.maker = maker;
    if (tensor != nullptr) {
        describe(made, *tensor);
    }
    settle_in(made, home);
    admit(call);
    return made;
}

// Give a record to a storage that was only counted. It becomes a source.
Record& Driver::list(Resident counted, const Home& home, const c10::TensorImpl* tensor) {
    note_uncounted(address_of(*home), counted.nbytes);
    engine.account(0, -counted.nbytes);
    return become_source(counted.maker, home, tensor);
}

// Record that a storage which was only counted is counted no longer.
void Driver::note_uncounted(const void* address, Bytes nbytes) noexcept {
    if (transcriber.writes()) {
        const auto id = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address));
        const Entry::Kind kind = Entry::Kind::uncounted;
        engine.journal.write({kind, id, nbytes, 0, engine.clock, engine.memory});
    }
}

// Register memory of the program that was not seen before. Throws `Shortage` if it does not fit.
Record& Driver::adopt(const c10::TensorImpl& tensor, c10::StorageImpl& home) {
    const Bytes nbytes = counted(home);
    // Until now its bytes counted as `outside_`.
    if (outside_) {
        engine.resize(*outside_, std::max<Bytes>(0, outside_->nbytes - nbytes));
    }
    const bool weight = is_weight(tensor);
    if (nbytes > engine.budget - engine.memory) {
        make_room(nbytes, weight ? "a parameter" : "a tensor of yours");
    }
    if (weight) {
        met.push_back(&home);
        owners_due = true;
    }
    return become_source(nullptr, home_of(tensor), &tensor);
}

// Note how the program refers to a new source.
void Driver::describe(Record& record, const c10::TensorImpl& tensor) {
    record.follow(tensor);
    const at::Tensor whole(record.origin.lock());
    record.parameter = whole.requires_grad() && whole.is_leaf();
}

// Note the origin but do not take the version counter. Autograd adopts a new result as it is only
// if nothing else refers to its counter.
void Driver::remember(Record& record, const c10::TensorImpl& tensor) {
    record.origin = weak(tensor);
    record.version.expected = Version::told_by(tensor.version_counter());
    record.unwatched = true;
}

// Keep the allocation number of an address that is known already.
void Driver::settle_at(
    const void* address,
    Record* record,
    Bytes nbytes,
    const Facts* maker,
    const c10::StorageImpl* home
) {
    Resident& there = table_.at(address);
    const AllocationId allocation = there.allocation != 0 ? there.allocation : ++allocations_;
    there = {record, nbytes, maker, home, allocation};
}

void Driver::settle_in(Record& record, const Home& home) {
    collect();  // the previous storage at this address is dead
    const bool on_cpu = home->device_type() == c10::DeviceType::CPU;
    record.address = address_of(*home);
    record.home = WeakHome(home);
    record.size = static_cast<Bytes>(home->nbytes());
    record.unheard = !on_cpu || !watch(*home);
    record.order.kept_for = {};
    // Memory that PyTorch did not allocate, or that it lent to NumPy, cannot be resized.
    if (((on_cpu && record.unheard) || !home->resizable()) && !record.foreign) {
        record.foreign = std::make_unique<Foreign>();
    }
    if (record.address == nullptr) {
        return;  // a value without bytes
    }
    const c10::StorageImpl* unheard = record.unheard ? home.get() : nullptr;
    settle_at(record.address, &record, record.nbytes, record.maker, unheard);
    if (record.unheard) {
        unheard_.push_back({record.address, record.home});
    }
}

Home Driver::take_home(Record& record) {
    if (record.address != nullptr) {
        table_.take(std::exchange(record.address, nullptr));
    }
    Home home = record.at();
    record.owned.reset();
    record.home = no_home();
    return home;
}

void Driver::succeed(Record& before, Record& after) {
    after.address = std::exchange(before.address, nullptr);
    after.home = std::exchange(before.home, no_home());
    after.owned = std::exchange(before.owned, Home());
    after.unheard = before.unheard;
    after.size = before.size;
    after.foreign = std::move(before.foreign);
    after.maker = after.maker == nullptr ? before.maker : after.maker;
    if (after.address != nullptr) {
        const auto* unheard = after.unheard ? after.home._unsafe_get_target() : nullptr;
        settle_at(after.address, &after, after.nbytes, after.maker, unheard);
    }
    not_held(before);
}

void Driver::hand_over(Record& before, Record& after) {
    before.successor = Ref<Storage>(&after);
    after.references += std::exchange(before.references, 0);
    if (after.references == 0) {
        let_home_go(after);
    }
}

Record& Driver::write_over(Call& call, Record& before) {
    Record& after = new_storage(call, before.nbytes);
    after.origin = before.origin;
    after.version.counter = before.version.counter;
    after.unwatched = before.unwatched;
    after.parameter = before.parameter;
    after.returnable = before.returnable;
    after.strays = before.strays;
    // Nothing asks for it any more, and `swap_tensors` refuses tensors with weak references.
    before.origin = no_tensor();
    succeed(before, after);
    hand_over(before, after);
    return after;
}

void Driver::retain(Record& record, const Home& home) {
    if (!record.owned) {
        record.owned = home;
    }
    engine.retain(record);
}

void Driver::use(Record& record) {
    const Ref<Storage> kept(&record);
    const auto asked_for = [&] {
        bring([&] {
            if (record.listed) {  // otherwise the program has freed it meanwhile
                engine.use(record.root);
            }
        });
    };
    if (record.resident) {
        asked_for();
    } else {
        lose([&] {
            poll();
            if (steps) {
                steps->wanting(record);
            }
            asked_for();
        });
    }
    if (record.listed) {
        maybe_held(record);
        // A copy cannot be waited for during CUDA graph capture.
        if (swapper != nullptr && !device.is_capturing()) {
            swapper->settle(record);
        }
    }
}

void Driver::pin(Record& record) {
    const Ref<Storage> kept(&record);
    const auto pinned = [&] { bring([&] { engine.pin(record.root); }); };
    if (record.resident) {
        pinned();
    } else {
        lose([&] {
            poll();
            pinned();
        });
    }
    if (record.consumed()) {
        own(record);
    }
    not_held(record);
}

void Driver::seal(Record& record) {
    perform([&] { engine.seal(record); });
}

void Driver::forget(Record& record) {
    const Ref<Storage> kept(&record);
    poll();
    bring([&] { engine.forget(record); });
}

void Driver::resized(Record& record) {
    const Home home = record.at();
    if (!home) {
        return;
    }
    const void* address = address_of(*home);
    if (address != record.address) {
        if (record.address != nullptr) {
            table_.take(record.address);
        }
        settle_in(record, home);
    }
    record.size = static_cast<Bytes>(home->nbytes());
    engine.resize(record, counted(*home));
    note_memory();
}

void Driver::keep(const c10::TensorImpl& tensor) {
    if (Record* record = known(tensor)) {
        pin(*record);
    }
}

void Driver::meet(const c10::TensorImpl& tensor) {
    if (resident_at(*tensor.unsafe_storage().unsafeGetStorageImpl()) == nullptr) {
        known(tensor);
    }
}

void Driver::note_if_it_strays(const c10::TensorImpl& tensor) {
    const auto* view = torch::autograd::impl::get_view_autograd_meta(borrowed(tensor));
    if (view == nullptr || !view->has_bw_view()) {
        return;
    }
    const c10::TensorImpl& base = *view->get_backward_view().base_.unsafeGetTensorImpl();
    if (has_memory(base) && is_plain(base) && has_memory(tensor) &&
        base.unsafe_storage().unsafeGetStorageImpl() !=
            tensor.unsafe_storage().unsafeGetStorageImpl()) {
        if (Record* record = known(base)) {
            record->strays = true;
        }
    }
}

void Driver::keep_from_now_on(const c10::TensorImpl& tensor) {
    Resident* found = resident_at(*tensor.unsafe_storage().unsafeGetStorageImpl());
    Record* record = found == nullptr ? nullptr : found->record;
    // A storage that is only counted has no recipe.
    if (record == nullptr || !record->replayable) {
        return;
    }
    const Ref<Storage> kept(record);
    if (!record->resident) {
        use(*record);
    }
    const bool returned = record->returns;
    perform([&] { engine.let_return(*record, false); });
    // A trace cannot say when a recipe ends, and it may have been recomputed before.
    if (may_forget(*record) && !(recorded && returned)) {
        seal(*record);
    }
}

void Driver::save_what_needs(const c10::TensorImpl& tensor) {
    Resident* found = resident_at(*tensor.unsafe_storage().unsafeGetStorageImpl());
    Record* record = found == nullptr ? nullptr : found->record;
    if (record != nullptr && record->consumed() && !record->replayable) {
        forget(*record);
    }
}

bool Driver::about_to_resize(c10::StorageImpl& home, Bytes nbytes) {
    bring_back(home);
    const Resident* found = resident_at(home);
    Record* known = found != nullptr ? &known_at(*found, home) : emptied_at(home);
    if (known == nullptr) {
        return false;
    }
    Record& record = *known;
    const Ref<Storage> kept(known);
    const Bytes more = nbytes - record.size;
    if (more < 0 && !record.replayable && record.consumed()) {
        forget(record);
    } else if (more > engine.budget - engine.memory && counts(home)) {
        make_room(more, "resize_");
    }
    // The old contents stay available to recipes that need them (R3, in-place writes).
    const bool written = record.replayable && more != 0;
    resizing_ = Ref<Storage>(written ? &changed_unseen(record) : &record);
    return true;
}

void Driver::has_been_resized() {
    if (const Ref<Storage> record = std::exchange(resizing_, {}); record) {
        collect();
        record_of(*record).order = device.streams.unknown();
        resized(record_of(*record));
        if (record_of(*record).size == 0) {
            emptied_.push_back(record);
        }
    }
}

// Find the record whose storage is `home`, which was resized to no bytes. Null: none.
Record* Driver::emptied_at(const c10::StorageImpl& home) {
    Record* found = nullptr;
    std::erase_if(emptied_, [&](const Ref<Storage>& each) {
        Record& record = record_of(*each);
        const Home there = record.at();
        found = there.get() == &home ? &record : found;
        return !there || there.get() == &home;
    });
    return found;
}

void Driver::own(Record& record) {
    if (!record.owned) {
        record.owned = record.home.lock();
    }
}

void Driver::disown(Record& record) {
    // A source stays while recipes read it.
    const bool stays = record.pinned || !record.replayable;
    const bool needed = record.references != 0 || (record.consumed() && stays);
    if (record.held && !needed) {
        let_home_go(record);  // now only the program keeps it, or nothing
    }
    let_go_of_idle();
}

// Drop our reference. If that was the last one and no deleter hook reports it, note the free here.
void Driver::let_home_go(Record& record) {
    record.owned.reset();
    if (!record.unheard || record.address == nullptr || !record.home.expired()) {
        return;
    }
    const Resident* found = table_.find(record.address);
    if (found != nullptr && found->record == &record) {
        forget_address(record.address, *found);
    }
}

// Drop our references to storages that the engine reports as needed by nothing.
void Driver::let_go_of_idle() {
    while (!engine.idle.empty()) {
        const Ref<Storage> idle = std::move(engine.idle.back());
        engine.idle.pop_back();
        if (idle->references == 0 && !idle->consumed()) {
            let_home_go(record_of(*idle));
        }
    }
}

}  // namespace rekindle
