#include "sources.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <unordered_set>
#include <utility>

#include "../../ops/signature.h"
#include "../../torch/geometry.h"
#include "../../torch/storage_ptr.h"

namespace rekindle {

// -- registration ---------------------------------------------------------------------------------

StorageRecord* Sources::find_or_register(const c10::TensorImpl& tensor) {
    c10::StorageImpl& storage_impl = *tensor.unsafe_storage().unsafeGetStorageImpl();
    if (address_of(storage_impl) == nullptr) {
        return nullptr;
    }
    AddressEntry* found = registry_.find(storage_impl);
    if (found != nullptr && found->record != nullptr && found->record->untracked) [[unlikely]] {
        if (found->record->storage_impl.expired()) {
            // The storage recorded at this address was freed without a report, and PyTorch gave its
            // address to `storage_impl`. So remove the old record first.
            registry_.poll_untracked();
            frees_.process_pending();
            found = registry_.find(storage_impl);
        } else if (
            found->record->special.is_external() &&
            std::cmp_less(found->record->size, storage_impl.nbytes())
        ) {
            widen(*found->record, storage_impl);
            found = registry_.find(storage_impl);  // the table has changed
        }
    }
    if (found == nullptr) {
        return &adopt(tensor, storage_impl);
    }
    return found->record != nullptr ? found->record : &list(*found, storage_of(tensor), &tensor);
}

StorageRecord& Sources::known_at(AddressEntry found, c10::StorageImpl& storage_impl) {
    return found.record != nullptr ? *found.record
                                   : list(found, StoragePtr::reclaim_copy(&storage_impl), nullptr);
}

// Give a record to a storage of which only the bytes were counted. It becomes a source (a storage
// without a recipe).
StorageRecord& Sources::list(
    AddressEntry counted, const StoragePtr& storage_impl, const c10::TensorImpl* tensor
) {
    const bool shares = share_with_overlapping(*storage_impl);
    observers_.transcriber.freed(address_of(*storage_impl), counted.nbytes);
    engine_.account(0, -counted.nbytes);
    StorageRecord& made = storages_.make_source(counted.maker, storage_impl, tensor);
    if (shares) [[unlikely]] {
        make_external(made);
    }
    return made;
}

// Register a storage of the program that no operator in this budget made or read before. Throws
// `OutOfBudgetError` if it does not fit.
StorageRecord& Sources::adopt(const c10::TensorImpl& tensor, c10::StorageImpl& storage_impl) {
    const bool shares = share_with_overlapping(storage_impl);
    const Bytes nbytes = registry_.devices.counted(storage_impl);
    // Until now the bytes of this storage counted as device memory that no operator reported
    // (`OutsideMemory`). Subtract them there, so that they do not count twice.
    frees_.outside.subtract(nbytes);
    const bool weight = is_weight(tensor);
    if (nbytes > engine_.budget - engine_.memory) {
        room_.make_room(nbytes, weight ? "a parameter" : "a tensor of yours");
    }
    if (weight) {
        observers_.due.new_parameters.push_back(&storage_impl);
        observers_.due.owners_due = true;
    }
    StorageRecord& made = storages_.make_source(nullptr, storage_of(tensor), &tensor);
    const std::optional<bool> exposed = exposed_.take(storage_impl);
    if (exposed) [[unlikely]] {
        made.read_unseen = true;
        made.suits_held_eviction = false;
    }
    if (shares || exposed.value_or(false)) [[unlikely]] {
        make_external(made);
    }
    return made;
}

StorageRecord* Sources::expose(c10::StorageImpl& storage_impl, bool written) {
    if (const AddressEntry* found = registry_.find(storage_impl)) {
        return &known_at(*found, storage_impl);
    }
    exposed_.add(storage_impl, written);
    return nullptr;
}

void Sources::keep(const c10::TensorImpl& tensor) {
    if (StorageRecord* record = find_or_register(tensor)) {
        room_.pin(*record);
    }
}

void Sources::register_tensors(const std::vector<const c10::TensorImpl*>& tensors) {
    std::vector<const c10::TensorImpl*> found;
    std::unordered_set<const c10::StorageImpl*> storages;
    Bytes needed = 0;
    for (const c10::TensorImpl* tensor : tensors) {
        if (!has_memory(*tensor)) {
            continue;
        }
        const c10::StorageImpl& storage_impl = *tensor->unsafe_storage().unsafeGetStorageImpl();
        if (registry_.find(storage_impl) == nullptr && storages.insert(&storage_impl).second) {
            found.push_back(tensor);
            needed += registry_.devices.counted(storage_impl);
        }
    }
    // until now the bytes of these tensors counted as memory that no operator reported
    needed -= std::min(needed, frees_.outside.nbytes());
    if (found.size() > 1 && needed > engine_.budget - engine_.memory) {
        room_.make_room(needed, "a model");
    }
    for (const c10::TensorImpl* each : found) {
        // Another thread may have counted this tensor while room for all of them was made.
        if (registry_.find(*each) == nullptr) {
            find_or_register(*each);
        }
    }
}

void Sources::note_shared_version_counter(const c10::TensorImpl& tensor) {
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

void Sources::pin_as_constant(const c10::TensorImpl& tensor) {
    StorageRecord* record = registry_.find_record(tensor);
    // A storage without a record, whose bytes are only counted, has no recipe.
    if (record == nullptr || !record->replayable) {
        return;
    }
    const Ref<Storage> kept(record);
    if (!record->resident) {
        room_.use(*record);
    }
    const bool returned = record->evictable_while_held;
    events_.perform([&] { engine_.set_evictable_while_held(*record, false); });
    // Keep the recipe if a trace is recorded and the value may have been recomputed before, because
    // a trace has no event for a dropped recipe.
    if (may_forget(*record) && !(observers_.recorded && returned)) {
        room_.seal(*record);
    }
}

void Sources::note_moved(const c10::TensorImpl& tensor, c10::StorageImpl& before) {
    registry_.drain();
    const AddressEntry* found = registry_.find(before);
    if (found == nullptr || !has_memory(tensor)) {
        return;
    }
    StorageRecord* record = found->record;
    const bool saved = record != nullptr && record->references != 0;
    // Handles made while operators were only counted hold the storage, and are not known by record.
    const bool counted = events_.only_counting.has_begun() && (found->saved || record != nullptr);
    if (saved || counted || registry_.moved_tensors.has(tensor)) {
        registry_.moved_tensors.note(tensor, saved ? record : nullptr, counted ? &before : nullptr);
    }
    if (record != nullptr) {
        record->stop_following(tensor);
    }
    if (tensor.version_counter().unique()) {
        return;
    }
    // Other tensors have the same version counter, so it also counts writes to the old memory.
    for (StorageRecord* each : {record, registry_.find_record(tensor)}) {
        if (each != nullptr) {
            each->shares_version_counter = true;
        }
    }
}

StorageRecord& Sources::settle(StorageRecord& record, const c10::TensorImpl& tensor) {
    if (!record.consumed()) {
        record.special.drop_gathered();
        record.absent = false;
        return record;
    }
    if (is_back(record, storage_of(tensor))) {
        return record;
    }
    const Ref<Storage> kept(&record);
    static_cast<void>(registry_.take(record));
    engine_.resize(record, 0);
    StorageRecord& now = *find_or_register(tensor);
    registry_.redirect(record, now);
    events_.perform([&] { engine_.drop(record); });
    return now;
}

// -- writes ---------------------------------------------------------------------------------------

void Sources::forget(StorageRecord& record) {
    const Ref<Storage> kept(&record);
    frees_.poll();
    gathered.detach_from(record);
    // Give up the values that have no room even now: the program gets an error if it reads one.
    for (const Ref<Storage>& each : without_room_that_need(record)) {
        if (each->listed && !record_of(*each).lost) {
            record_of(*each).lost = true;
            room_.seal(record_of(*each));
        }
    }
    room_.bring([&] { engine_.forget(record); });
}

std::vector<Ref<Storage>> Sources::without_room_that_need(StorageRecord& record) const {
    std::vector<Ref<Storage>> found;
    if (registry_.placeholders == 0) [[likely]] {
        return found;
    }
    std::vector<Storage*> made;
    engine_.graph.made_through(record, made);
    for (Storage* each : made) {
        if (!each->dead() && room_.is_without_room(record_of(*each))) {
            found.emplace_back(each);
        }
    }
    return found;
}

bool Sources::save_what_needs(const c10::TensorImpl& tensor) {
    StorageRecord* record = registry_.find_record(tensor);
    if (record == nullptr) {
        return false;
    }
    const bool saves = record->consumed() && !record->replayable;
    if (saves) {
        forget(*record);
    }
    return (record->special.is_external() && save_overlapping(*record)) || saves;
}

void Sources::mark_externally_writable(c10::StorageImpl& storage_impl) {
    frees_.process_pending();
    room_.bring_back(storage_impl);
    if (StorageRecord* record = expose(storage_impl, true)) {
        make_external(*record);
    }
    share_with_overlapping(storage_impl);
}

void Sources::about_to_write_unseen(c10::StorageImpl& storage_impl) {
    frees_.process_pending();
    room_.bring_back(storage_impl);
    if (StorageRecord* record = registry_.find_record(storage_impl)) {
        new_contents_of(*record);
    }
    share_with_overlapping(storage_impl);
    for (const Ref<Storage>& each : overlapping(storage_impl)) {
        new_contents_of(record_of(*each));
    }
}

void Sources::version_raised(c10::StorageImpl& storage_impl) {
    frees_.process_pending();
    StorageRecord* known = registry_.find_record(storage_impl);
    if (known == nullptr) {
        return;
    }
    StorageRecord& record = *known;
    const Ref<Storage> kept(known);
    if (record.replayable) {
        // The old contents can be recomputed. Nothing has written memory that is evicted.
        StorageRecord& after = record.resident ? storages_.record_external_write(record) : record;
        after.version.expected = -1;
        return;
    }
    events_.about_to_write(record);
    std::vector<Storage*> made;
    engine_.graph.made_through(record, made);
    bool evicted = false;
    for (Storage* each : made) {
        if (each->resident) {
            room_.seal(record_of(*each));
        }
        evicted = evicted || !each->resident;
    }
    // An evicted value can no longer be recomputed: the old contents may be gone. If it is needed,
    // the version check raises.
    if (evicted) {
        record.special.make_external();
        stays(record);
    } else {
        record.version.expected = -1;
    }
}

// Prepare for a write to the memory of `record` that no operator reports. Recipes of other values
// never read the new contents by mistake. Return the record of the new contents.
StorageRecord& Sources::new_contents_of(StorageRecord& record) {
    const Ref<Storage> kept(&record);
    if (record.consumed() && !record.replayable) {
        forget(record);
        // The values that needed the old contents may have taken the room of `record`.
        if (record.placeholder) {
            room_.use(record);
        }
    }
    events_.about_to_write(record);
    if (record.replayable) {
        return storages_.record_external_write(record);
    }
    record.clear_flags();
    return record;
}

void Sources::make_external(StorageRecord& record) {
    if (!record.special.is_external()) {
        StorageRecord& now = new_contents_of(record);
        now.special.make_external();
        stays(now);
    }
}

// Do not move the source `record` to the host any more: other code may write its memory.
void Sources::stays(StorageRecord& record) {
    if (record.evictable_while_held && !record.replayable) [[unlikely]] {
        engine_.set_evictable_while_held(record, false);
    }
}

// -- storages that share memory -------------------------------------------------------------------

// Return the records of the other storages that share memory with `storage_impl`. A storage without
// a record is left out: no recipe reads it.
std::vector<Ref<Storage>> Sources::overlapping(c10::StorageImpl& storage_impl) {
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
            if (StorageRecord* record = registry_.find_record(*each)) {
                add(*record);
            }
        }
        return found;
    }
    // On a CPU, the keys of the table are addresses of memory.
    const bool by_key = storage_impl.device_type() == c10::DeviceType::CPU;
    registry_.table.each([&](const void* key, const AddressEntry& entry) {
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

bool Sources::share_with_overlapping(c10::StorageImpl& storage_impl) {
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
void Sources::widen(StorageRecord& record, c10::StorageImpl& storage_impl) {
    const Ref<Storage> kept(&record);
    const Bytes more = registry_.devices.counted(storage_impl) - record.nbytes;
    if (more > engine_.budget - engine_.memory) {
        room_.make_room(more, "a tensor of yours");
    }
    share_with_overlapping(storage_impl);
    new_contents_of(record).special.make_external();  // without the copy of the first part
    const StoragePtr whole = StoragePtr::reclaim_copy(&storage_impl);
    registry_.table.take(record);
    if (record.keeper) {
        record.keeper = whole;
    }
    registry_.bind(record, whole);
    engine_.resize(record, registry_.devices.counted(storage_impl));
    events_.note_memory();
}

bool Sources::overlaps(const StorageRecord& record) const {
    const StoragePtr storage_impl = record.at();
    return storage_impl && foreign_.shares(MemoryRange::of(*storage_impl));
}

bool Sources::save_overlapping(StorageRecord& record) {
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

StorageRecord& Sources::copy_now(StorageRecord& record, StoragePtr& storage_impl) {
    room_.make_room(record.nbytes, "a copy of memory that NumPy or another process may write");
    storage_impl = copy_of(record.at());
    StorageRecord& made = storages_.make_source(nullptr, storage_impl, nullptr);
    record.special.external()->copy = Ref<Storage>(&made);
    return made;
}

StorageRecord* copy_still(const StorageRecord& record) {
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

}  // namespace rekindle
