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
//
// Two storages may share memory (memory/foreign_memory.h). A write to one of them then changes the
// other, so both count as external memory. Operators that write one of them are seen: before,
// values that need the old contents of the other are recomputed too.
#include <cstring>
#include <memory>
#include <utility>

#include "../torch/geometry.h"
#include "driver.h"
#include "swapper.h"

namespace rekindle {

void Driver::mark_externally_writable(c10::StorageImpl& storage_impl) {
    frees.process_pending();
    room.bring_back(storage_impl);
    // If the memory is not registered yet, the first operator that reads it registers it as
    // external.
    if (const AddressEntry* found = registry.find(storage_impl)) {
        make_external(known_at(*found, storage_impl));
    }
    share_with_overlapping(storage_impl);
}

void Driver::about_to_write_unseen(c10::StorageImpl& storage_impl) {
    frees.process_pending();
    room.bring_back(storage_impl);
    const AddressEntry* found = registry.find(storage_impl);
    if (found != nullptr && found->record != nullptr) {
        new_contents_of(*found->record);
    }
    share_with_overlapping(storage_impl);
    for (const Ref<Storage>& each : overlapping(storage_impl)) {
        new_contents_of(record_of(*each));
    }
}

void Driver::version_raised(c10::StorageImpl& storage_impl) {
    frees.process_pending();
    const AddressEntry* found = registry.find(storage_impl);
    if (found == nullptr || found->record == nullptr) {
        return;
    }
    StorageRecord& record = *found->record;
    const Ref<Storage> kept(&record);
    if (record.replayable) {
        // The old contents can be recomputed. Nothing has written memory that is evicted.
        StorageRecord& after = record.resident ? record_external_write(record) : record;
        after.version.expected = -1;
        return;
    }
    std::vector<Storage*> made;
    engine.graph.made_through(record, made);
    bool evicted = false;
    for (Storage* each : made) {
        if (each->resident) {
            room.seal(record_of(*each));
        }
        evicted = evicted || !each->resident;
    }
    // An evicted value can no longer be recomputed: the old contents may be gone. If it is needed,
    // the version check raises.
    if (evicted) {
        record.special.make_external();
    } else {
        record.version.expected = -1;
    }
}

// Prepare for a write to the memory of `record` that no operator reports. Recipes of other values
// never read the new contents by mistake. Return the record of the new contents.
StorageRecord& Driver::new_contents_of(StorageRecord& record) {
    const Ref<Storage> kept(&record);
    events.finish_swap_out(record);
    if (record.replayable) {
        return record_external_write(record);
    }
    if (record.consumed()) {
        forget(record);
    }
    record.clear_flags();
    return record;
}

void Driver::make_external(StorageRecord& record) {
    if (!record.special.is_external()) {
        new_contents_of(record).special.make_external();
    }
}

// -- storages that share memory -------------------------------------------------------------------

// Return the records of the other storages that share memory with `storage_impl`. A storage without
// a record is left out: no recipe reads it.
std::vector<Ref<Storage>> Driver::overlapping(c10::StorageImpl& storage_impl) {
    std::vector<Ref<Storage>> found;
    const MemoryRange range = MemoryRange::of(storage_impl);
    const auto add = [&](StorageRecord& record) {
        const StoragePtr there = record.at();
        if (there && address_of(*there) != address_of(storage_impl) &&
            there->device() == storage_impl.device() && MemoryRange::of(*there).overlaps(range)) {
            found.emplace_back(&record);
        }
    };
    if (!is_foreign(storage_impl)) {
        for (const StoragePtr& each : foreign_.within(range)) {
            const AddressEntry* entry = registry.find(*each);
            if (entry != nullptr && entry->record != nullptr) {
                add(*entry->record);
            }
        }
        return found;
    }
    // On a CPU, the keys of the table are addresses of memory.
    const bool by_key = storage_impl.device_type() == c10::DeviceType::CPU;
    registry.table.each([&](const void* key, const AddressEntry& entry) {
        if (entry.record == nullptr) {
            return;
        }
        const auto* first = static_cast<const char*>(key);
        if (!by_key || MemoryRange{first, first + entry.record->size}.overlaps(range)) {
            add(*entry.record);
        }
    });
    return found;
}

bool Driver::share_with_overlapping(c10::StorageImpl& storage_impl) {
    const bool foreign = is_foreign(storage_impl);
    const MemoryRange range = MemoryRange::of(storage_impl);
    if ((!foreign && !foreign_.any()) || range.begin == nullptr) [[likely]] {
        return false;
    }
    const std::vector<Ref<Storage>> found = overlapping(storage_impl);
    for (const Ref<Storage>& each : found) {
        make_external(record_of(*each));
    }
    if (foreign) {
        foreign_.add(storage_impl, !found.empty());
        return !found.empty();
    }
    return foreign_.shares(range);
}

// The external memory `record` is the first part of `storage_impl`, or of the same array. Let the
// record have all of this memory.
void Driver::widen(StorageRecord& record, c10::StorageImpl& storage_impl) {
    const Ref<Storage> kept(&record);
    const Bytes more = registry.devices.counted(storage_impl) - record.nbytes;
    if (more > engine.budget - engine.memory) {
        room.make_room(more, "a tensor of yours");
    }
    share_with_overlapping(storage_impl);
    new_contents_of(record).special.make_external();  // without the copy of the first part
    const StoragePtr whole = StoragePtr::reclaim_copy(&storage_impl);
    registry.table.take(record);
    if (record.keeper) {
        record.keeper = whole;
    }
    registry.bind(record, whole);
    engine.resize(record, registry.devices.counted(storage_impl));
    events.note_memory();
}

bool Driver::overlaps(const StorageRecord& record) const {
    const StoragePtr storage_impl = record.at();
    return storage_impl && foreign_.shares(MemoryRange::of(*storage_impl));
}

bool Driver::save_overlapping(StorageRecord& record) {
    if (!overlaps(record)) {
        return false;
    }
    bool saved = false;
    for (const Ref<Storage>& each : overlapping(*record.at())) {
        saved = saved || each->consumed();
        new_contents_of(record_of(*each));
    }
    return saved;
}

// -- tensors that get other memory ----------------------------------------------------------------

void Driver::note_moved(const c10::TensorImpl& tensor, c10::StorageImpl& before) {
    registry.drain();
    const AddressEntry* found = registry.find(before);
    if (found == nullptr || !has_memory(tensor)) {
        return;
    }
    StorageRecord* record = found->record;
    const bool saved = record != nullptr && record->references != 0;
    // Handles made while operators were only counted hold the storage, and are not known by record.
    const bool counted = events.only_counting.has_begun() && (found->saved || record != nullptr);
    if (saved || counted || registry.moved_tensors.has(tensor)) {
        registry.moved_tensors.note(tensor, saved ? record : nullptr, counted ? &before : nullptr);
    }
    if (record != nullptr) {
        record->stop_following(tensor);
    }
    if (tensor.version_counter().unique()) {
        return;
    }
    // Other tensors have the same version counter, so it also counts writes to the old memory.
    found = registry.find(*tensor.unsafe_storage().unsafeGetStorageImpl());
    for (StorageRecord* each : {record, found == nullptr ? nullptr : found->record}) {
        if (each != nullptr) {
            each->shares_version_counter = true;
        }
    }
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
    room.make_room(record.nbytes, "a copy of memory that NumPy or another process may write");
    storage_impl = copy_of(record.at());
    StorageRecord& made = make_source(nullptr, storage_impl, nullptr);
    record.special.external()->copy = Ref<Storage>(&made);
    return made;
}

// -- `torch.utils.swap_tensors` refuses tensors with weak references ------------------------------

void Driver::suspend_origin_tracking(const c10::TensorImpl& tensor) {
    frees.process_pending();
    observers.module_tensors.remove(tensor);
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
