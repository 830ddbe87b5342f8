// How a budget's driver registers storages, reports their use to the engine, and frees them.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../allocator/counting_allocator.h"
#include "../ops/signature.h"
#include "../torch/geometry.h"
#include "../torch/storage_ptr.h"
#include "driver.h"
#include "gathered.h"
#include "swapper.h"

namespace rekindle {

// -- storages -------------------------------------------------------------------------------------

void Driver::open() {
    if (device.queues()) {
        Recipe& call = new_call(nullptr, 0, false);
        const Ref<Call> kept(&call);
        frees.outside.count_in(new_storage(call, device.allocated()));
        admit(call);
    }
}

Recipe& Driver::new_call(const Facts* facts, Nanoseconds cost, bool replayable) {
    observers.due.places_due = observers.due.notes_places;
    return registry.records.make_call(engine.graph, facts, cost, replayable);
}

StorageRecord& Driver::new_storage(Call& call, Bytes nbytes) {
    StorageRecord& made = registry.records.make_storage(engine.graph, nbytes);
    device.streams.note(made.id, device.streams.unknown());
    engine.graph.makes(call, made);
    return made;
}

void Driver::admit(Recipe& call, Bytes workspace) {
    const Ref<Call> kept(&call);
    if (workspace != 0) [[unlikely]] {
        if (call.aside == nullptr) {
            call.aside = std::make_unique<Recipe::Aside>();
        }
        call.aside->workspace = workspace;
        call.has_workspace = true;
    }
    if (observers.transcriber.writes()) [[unlikely]] {
        observers.transcriber.called(call.name(), workspace);
    }
    events.perform([&] { engine.admit(call, true); });
    for (Value* value : call.outputs()) {
        if (value->storage->replayable || events.swapper != nullptr) {
            registry.held_list.add(record_of(*value->storage));
        }
    }
    if (observers.steps != nullptr) {
        observers.steps->made(call);
    }
    if (observers.audit) [[unlikely]] {
        observers.audit->made(call, device);
    }
    events.note_memory();
}

void Driver::account(const Facts& facts, Nanoseconds cost, Bytes workspace) {
    if (observers.transcriber.writes()) {
        Recipe& call = new_call(&facts, cost, false);
        const Ref<Call> kept(&call);
        admit(call, workspace);
    } else {
        count(cost, 0, workspace);
    }
}

void Driver::count(Nanoseconds cost, Bytes nbytes, Bytes workspace) {
    engine.account(cost, nbytes, workspace);
    events.note_memory();
}

StorageRecord* Driver::find_or_register(const c10::TensorImpl& tensor) {
    c10::StorageImpl& storage_impl = *tensor.unsafe_storage().unsafeGetStorageImpl();
    if (address_of(storage_impl) == nullptr) {
        return nullptr;
    }
    AddressEntry* found = registry.find(storage_impl);
    if (found != nullptr && found->record != nullptr && found->record->untracked) [[unlikely]] {
        if (found->record->storage_impl.expired()) {
            // The storage recorded at this address was freed without a report, and PyTorch gave its
            // address to `storage_impl`. So remove the old record first.
            registry.poll_untracked();
            frees.process_pending();
            found = registry.find(storage_impl);
        } else if (
            found->record->special.is_external() &&
            std::cmp_less(found->record->size, storage_impl.nbytes())
        ) {
            widen(*found->record, storage_impl);
            found = registry.find(storage_impl);  // the table has changed
        }
    }
    if (found == nullptr) {
        return &adopt(tensor, storage_impl);
    }
    return found->record != nullptr ? found->record : &list(*found, storage_of(tensor), &tensor);
}

// Return the record of the table entry `found`. A storage of which only the bytes were counted
// becomes a source (a value without a recipe).
StorageRecord& Driver::known_at(AddressEntry found, c10::StorageImpl& storage_impl) {
    return found.record != nullptr ? *found.record
                                   : list(found, StoragePtr::reclaim_copy(&storage_impl), nullptr);
}

// Register the memory of `storage_impl` as a source (a storage without a recipe). `maker` is the
// operator of the program that made it, or null.
StorageRecord& Driver::make_source(
    const Facts* maker, const StoragePtr& storage_impl, const c10::TensorImpl* tensor
) {
    Recipe& call = new_call(maker, 0, false);
    const Ref<Call> kept(&call);
    StorageRecord& made = new_storage(call, registry.devices.counted(*storage_impl));
    made.maker = maker;
    if (tensor != nullptr) {
        describe(made, *tensor);
    }
    registry.bind(made, storage_impl);
    admit(call);
    return made;
}

// Give a record to a storage of which only the bytes were counted. It becomes a source (a storage
// without a recipe).
StorageRecord& Driver::list(
    AddressEntry counted, const StoragePtr& storage_impl, const c10::TensorImpl* tensor
) {
    const bool shares = share_with_overlapping(*storage_impl);
    observers.transcriber.freed(address_of(*storage_impl), counted.nbytes);
    engine.account(0, -counted.nbytes);
    StorageRecord& made = make_source(counted.maker, storage_impl, tensor);
    if (shares) [[unlikely]] {
        make_external(made);
    }
    return made;
}

// Register a storage of the program that no operator in this budget made or read before. Throws
// `OutOfBudgetError` if it does not fit.
StorageRecord& Driver::adopt(const c10::TensorImpl& tensor, c10::StorageImpl& storage_impl) {
    const bool shares = share_with_overlapping(storage_impl);
    const Bytes nbytes = registry.devices.counted(storage_impl);
    // Until now the bytes of this storage counted as device memory that no operator reported
    // (`OutsideMemory`). Subtract them there, so that they do not count twice.
    frees.outside.subtract(nbytes);
    const bool weight = is_weight(tensor);
    if (nbytes > engine.budget - engine.memory) {
        room.make_room(nbytes, weight ? "a parameter" : "a tensor of yours");
    }
    if (weight) {
        observers.due.new_parameters.push_back(&storage_impl);
        observers.due.owners_due = true;
    }
    StorageRecord& made = make_source(nullptr, storage_of(tensor), &tensor);
    if (shares) [[unlikely]] {
        make_external(made);
    }
    return made;
}

StorageRecord& Driver::record_inplace_write(Call& call, StorageRecord& before) {
    StorageRecord& after = new_storage(call, before.nbytes);
    after.origin = before.origin;
    after.version.counter = before.version.counter;
    after.unwatched = before.unwatched;
    after.parameter = before.parameter;
    after.suits_held_eviction = before.suits_held_eviction;
    after.shares_version_counter = before.shares_version_counter;
    // The new version of the value follows this tensor from now on. `torch.utils.swap_tensors`
    // refuses a tensor to which several weak references exist, so drop the old one.
    before.origin = no_tensor();
    registry.transfer(before, after);
    registry.redirect(before, after);
    return after;
}

void Driver::retain(StorageRecord& record, const StoragePtr& storage_impl) {
    if (!record.keeper) {
        record.keeper = storage_impl;
    }
    engine.retain(record);
}

void Driver::forget(StorageRecord& record) {
    const Ref<Storage> kept(&record);
    frees.poll();
    detach_from(*this, record);
    room.bring([&] { engine.forget(record); });
}

void Driver::keep(const c10::TensorImpl& tensor) {
    if (StorageRecord* record = find_or_register(tensor)) {
        room.pin(*record);
    }
}

void Driver::register_tensors(const std::vector<const c10::TensorImpl*>& tensors) {
    std::vector<const c10::TensorImpl*> found;
    std::unordered_set<const c10::StorageImpl*> storages;
    Bytes needed = 0;
    for (const c10::TensorImpl* tensor : tensors) {
        if (!has_memory(*tensor)) {
            continue;
        }
        const c10::StorageImpl& storage_impl = *tensor->unsafe_storage().unsafeGetStorageImpl();
        if (registry.find(storage_impl) == nullptr && storages.insert(&storage_impl).second) {
            found.push_back(tensor);
            needed += registry.devices.counted(storage_impl);
        }
    }
    // until now the bytes of these tensors counted as memory that no operator reported
    needed -= std::min(needed, frees.outside.nbytes());
    if (found.size() > 1 && needed > engine.budget - engine.memory) {
        room.make_room(needed, "a model");
    }
    for (const c10::TensorImpl* each : found) {
        // Another thread may have counted this tensor while room for all of them was made.
        if (registry.find(*each->unsafe_storage().unsafeGetStorageImpl()) == nullptr) {
            find_or_register(*each);
        }
    }
}

void Driver::note_shared_version_counter(const c10::TensorImpl& tensor) {
    // Read the view metadata directly: `get_view_autograd_meta` wants an `at::Tensor`, which would
    // count a reference.
    const auto* meta = static_cast<const torch::autograd::AutogradMeta*>(tensor.autograd_meta());
    if (meta == nullptr || !meta->is_view_) [[likely]] {
        return;
    }
    const auto& view = static_cast<const torch::autograd::DifferentiableViewMeta&>(*meta);
    if (!view.has_bw_view()) {
        return;
    }
    const c10::TensorImpl& base = *view.get_backward_view().base_.unsafeGetTensorImpl();
    if (has_memory(base) && is_plain(base) && has_memory(tensor) &&
        base.unsafe_storage().unsafeGetStorageImpl() !=
            tensor.unsafe_storage().unsafeGetStorageImpl()) {
        if (StorageRecord* record = find_or_register(base)) {
            record->shares_version_counter = true;
        }
    }
}

void Driver::pin_as_constant(const c10::TensorImpl& tensor) {
    AddressEntry* found = registry.find(*tensor.unsafe_storage().unsafeGetStorageImpl());
    StorageRecord* record = found == nullptr ? nullptr : found->record;
    // A storage without a record, whose bytes are only counted, has no recipe.
    if (record == nullptr || !record->replayable) {
        return;
    }
    const Ref<Storage> kept(record);
    if (!record->resident) {
        room.use(*record);
    }
    const bool returned = record->evictable_while_held;
    events.perform([&] { engine.set_evictable_while_held(*record, false); });
    // Keep the recipe if a trace is recorded and the value may have been recomputed before, because
    // a trace has no event for a dropped recipe.
    if (may_forget(*record) && !(observers.recorded && returned)) {
        room.seal(*record);
    }
}

bool Driver::save_what_needs(const c10::TensorImpl& tensor) {
    AddressEntry* found = registry.find(*tensor.unsafe_storage().unsafeGetStorageImpl());
    StorageRecord* record = found == nullptr ? nullptr : found->record;
    if (record == nullptr) {
        return false;
    }
    const bool saves = record->consumed() && !record->replayable;
    if (saves) {
        forget(*record);
    }
    return (record->special.is_external() && save_overlapping(*record)) || saves;
}

bool Driver::about_to_resize(c10::StorageImpl& storage_impl, Bytes nbytes, std::int64_t newest) {
    room.bring_back(storage_impl);
    const AddressEntry* found = registry.find(storage_impl);
    StorageRecord* known =
        found != nullptr ? &known_at(*found, storage_impl) : emptied_at(storage_impl);
    if (known == nullptr) {
        return false;
    }
    StorageRecord& record = *known;
    const Ref<Storage> kept(known);
    events.finish_swap_out(record);
    const Bytes more = nbytes - record.size;
    if (more < 0 && !record.replayable && record.consumed()) {
        const bool leaves = (newest >= 0 && !device.is_capturing()) || record.absent;
        leaves ? leave(*this, record, newest) : forget(record);
    } else if (more > engine.budget - engine.memory && registry.devices.counts(storage_impl)) {
        room.make_room(more, "resize_");
    }
    // Recipes may need the contents before the resize, so register the resize as a write (R3,
    // in-place writes).
    const bool written = record.replayable && more != 0;
    resizing_ = Ref<Storage>(written ? &record_external_write(record) : &record);
    return true;
}

void Driver::has_been_resized() {
    if (const Ref<Storage> record = std::exchange(resizing_, {}); record) {
        registry.drain();
        device.streams.note(record->id, device.streams.unknown());
        frees.resized(record_of(*record));
        if (record_of(*record).size == 0) {
            emptied_.push_back(record);
        }
    }
}

// Return the record of `storage_impl`, which the program has resized to zero bytes, or null.
StorageRecord* Driver::emptied_at(const c10::StorageImpl& storage_impl) {
    StorageRecord* found = nullptr;
    std::erase_if(emptied_, [&](const Ref<Storage>& each) {
        StorageRecord& record = record_of(*each);
        const StoragePtr there = record.at();
        found = there.get() == &storage_impl ? &record : found;
        return !there || there.get() == &storage_impl;
    });
    return found;
}

}  // namespace rekindle
