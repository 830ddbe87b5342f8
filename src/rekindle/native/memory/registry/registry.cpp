#include "registry.h"

#include <utility>

#include "../../torch/poison.h"
#include "../../torch/storage_ptr.h"

namespace rekindle {

Bytes Registry::count(c10::StorageImpl& storage_impl, const Facts* maker) {
    const void* address = address_of(storage_impl);
    const bool on_cpu = storage_impl.device_type() == c10::DeviceType::CPU;
    if (address == nullptr || table.find(address) != nullptr ||
        (on_cpu && !hook_deleter(storage_impl))) [[unlikely]] {
        // Memory of an allocator that the runtime does not hook is not counted now. When an
        // operator reads such memory, it becomes a source (a value without a recipe).
        return 0;
    }
    const Bytes nbytes = devices.counted(storage_impl);
    table.add(address, nullptr, nbytes, maker, on_cpu ? nullptr : &storage_impl);
    if (!on_cpu) [[unlikely]] {
        untracked.add(address, weak(storage_impl));
    }
    return nbytes;
}

void Registry::note_saved(const c10::StorageImpl& storage_impl) {
    if (AddressEntry* found = find(storage_impl)) {
        found->saved = true;
    }
}

void Registry::bind(StorageRecord& record, const StoragePtr& storage_impl) {
    drain();  // the previous storage at this address was freed, so remove its entry
    const bool on_cpu = storage_impl->device_type() == c10::DeviceType::CPU;
    record.address = address_of(*storage_impl);
    record.storage_impl = weak(*storage_impl);
    record.size = static_cast<Bytes>(storage_impl->nbytes());
    record.untracked = !on_cpu || !hook_deleter(*storage_impl);
    device.streams.moved(record.id);
    // If PyTorch did not allocate this memory, or has lent it to NumPy (then it cannot be resized),
    // code outside PyTorch may write it.
    if (((on_cpu && record.untracked) || !storage_impl->resizable()) &&
        !record.special.is_external()) [[unlikely]] {
        record.special.make_external();
    }
    if (record.address == nullptr) [[unlikely]] {
        return;  // the value has no bytes
    }
    const c10::StorageImpl* polled = record.untracked ? storage_impl.get() : nullptr;
    StorageRecord* const before =
        table.put(record.address, &record, record.nbytes, record.maker, polled);
    if (before != nullptr && before != &record && before->address == record.address) [[unlikely]] {
        // PyTorch has exchanged two storages, as it does to share one with another process. The
        // storage of `before` is gone, and `record` has its memory.
        before->address = nullptr;
        pending.storages.emplace_back(before);
    }
    if (record.untracked) [[unlikely]] {
        untracked.add(record.address, record.storage_impl);
    }
}

StoragePtr Registry::take(StorageRecord& record) {
    table.take(record);
    StoragePtr storage_impl = record.at();
    record.keeper.reset();
    record.storage_impl = no_storage();
    return storage_impl;
}

void Registry::transfer(StorageRecord& before, StorageRecord& after) {
    after.address = std::exchange(before.address, nullptr);
    after.storage_impl = std::exchange(before.storage_impl, no_storage());
    after.keeper = std::exchange(before.keeper, StoragePtr());
    after.untracked = before.untracked;
    after.size = before.size;
    after.special.take_external(before.special);
    after.maker = after.maker == nullptr ? before.maker : after.maker;
    if (after.address != nullptr) {
        const auto* polled = after.untracked ? after.storage_impl._unsafe_get_target() : nullptr;
        table.put(after.address, &after, after.nbytes, after.maker, polled);
    }
    held_list.remove(before);
}

void Registry::redirect(StorageRecord& before, StorageRecord& after) {
    before.successor = Ref<Storage>(&after);
    after.references += std::exchange(before.references, 0);
    if (after.references == 0) {
        drop_keeper(after);
    }
}

void Registry::drop_keeper(StorageRecord& record) {
    record.keeper.reset();
    if (!record.untracked || record.address == nullptr || !record.storage_impl.expired()) {
        return;
    }
    const AddressEntry* found = table.find(record.address);
    if (found != nullptr && found->record == &record) {
        drop_address(record.address, *found);
    }
}

void Registry::vacate(StorageRecord& record) {
    if (poisons() && record.keeper) [[unlikely]] {
        if (!record.leaving && !record.coming && !record.is_held()) {
            device.in_order([&] { poison(record.keeper); });
        }
    }
    if (device.queues()) {
        if (const StoragePtr storage_impl =
                record.at()) {  // null: the program has just freed the storage
            device.keep_until_read(*storage_impl, record.id);
        }
    }
    table.take(record);
    record.storage_impl = no_storage();
    record.keeper.reset();
}

void Registry::attach(StorageRecord& record, const StoragePtr& storage_impl) {
    device.streams.note(record.id, device.streams.unknown());
    place(record, storage_impl, detach_placeholder(record));
}

void Registry::place(
    StorageRecord& record, const StoragePtr& storage_impl, const StoragePtr& placeholder
) {
    if (placeholder) {
        table.take(record);
        restore_into(*placeholder, *storage_impl);
        // the program may free its own storage before the restored value is read
        record.keeper = placeholder;
    } else {
        // The program has freed the empty storage of this value, so forget the tensor by which it
        // referred to the value.
        record.version = Version();
        record.unwatched = false;
        record.origin = no_tensor();
        record.keeper = storage_impl;
    }
    bind(record, record.keeper);
}

StoragePtr Registry::evict(StorageRecord& record) {
    if (is_held_but_evictable(record)) [[unlikely]] {
        return evict_keeping_placeholder(record);
    }
    held_list.remove(record);
    vacate(record);
    return {};
}

StoragePtr Registry::evict_keeping_placeholder(StorageRecord& record) {
    StoragePtr storage_impl = record.at();
    // If the program freed the storage just now, maybe in another thread, no placeholder is needed.
    if (!storage_impl || !record.is_held()) {
        held_list.remove(record);
        vacate(record);
        // The value is evicted like a user-held one, but the program has freed its storage.
        record.placeholder = true;
        ++placeholders;
        pending.storages.emplace_back(&record);
        return storage_impl;
    }
    // The allocator does not reuse the evicted memory before the streams that still read it are
    // done.
    if (device.queues()) {
        device.keep_until_read(*storage_impl, record.id);
    }
    table.take(record.address);
    record.keeper.reset();
    StoragePtr memory = make_placeholder(*storage_impl);
    bind_placeholder(record, *storage_impl);
    return memory;
}

// Enter the placeholder `storage_impl` into the address table as that of `record`.
void Registry::bind_placeholder(StorageRecord& record, c10::StorageImpl& storage_impl) {
    drain();  // remove the entry of an earlier storage at the address of the placeholder
    record.storage_impl = weak(storage_impl);
    record.address = address_of(storage_impl);
    record.placeholder = true;
    ++placeholders;
    table.put(record.address, &record, record.nbytes, record.maker, nullptr);
}

StoragePtr Registry::make_placeholder_of(StorageRecord& record) {
    StoragePtr made = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(),
        static_cast<std::size_t>(record.size),
        c10::DataPtr(nullptr, device.which()),
        c10::GetAllocator(device.which().type()),
        true
    );
    static_cast<void>(make_placeholder(*made));
    bind_placeholder(record, *made);
    return made;
}

StoragePtr Registry::detach_placeholder(StorageRecord& record) {
    if (!record.placeholder) {
        return {};
    }
    record.placeholder = false;
    --placeholders;
    table.take(record);
    pending.restored.emplace_back(&record);
    return record.storage_impl.lock();
}

void Registry::drain() {
    assert_locked();
    if (!free_queue.any()) {
        return;
    }
    pending.take(free_queue);
    for (const void* address : pending.addresses) {
        // no entry in the address table means that the runtime evicted the storage, and the program
        // did not free it
        if (const AddressEntry* found = table.find(address)) {
            drop_address(address, *found);
        }
    }
    pending.addresses.clear();
}

void Registry::poll_untracked(bool youngest) {
    untracked.poll(youngest, [&](const UntrackedStorage& each) {
        const AddressEntry* found = table.find(each.address);
        if (found != nullptr && found->storage_impl == each.storage_impl._unsafe_get_target()) {
            drop_address(each.address, *found);
            pending.found_by_polling = true;
        }  // no entry: the storage was evicted, not freed by the program
    });
}

// Remove the entry of `address`, whose memory the program freed, from the address table.
void Registry::drop_address(const void* address, AddressEntry resident) {
    if (resident.record == nullptr) {
        observers.transcriber.freed(address, resident.nbytes);
        pending.counted += resident.nbytes;
    } else {
        resident.record->address = nullptr;
        pending.storages.emplace_back(resident.record);
    }
    table.take(address);
}

void Registry::dispose(StorageRecord& record) noexcept {
    held_list.remove(record);
    table.take(record);
    if (observers.audit) [[unlikely]] {
        observers.audit->forget(record);
    }
    device.streams.forget(record.id);
    records.drop(record);
}

void Registry::close() {
    pending.take(free_queue);
    for (StorageRecord* record : pending.handles) {
        let(static_cast<Storage&>(*record));
    }
    pending.clear();
    untracked.clear();
    moved_tensors.clear();
}

const char* Registry::fault(Storage* first) {
    if (pending.any()) {
        return "a free is not reported to the engine";
    }
    std::size_t listed = 0;
    bool is_held = true;
    held_list.each([&](const StorageRecord& record) {
        ++listed;
        is_held = is_held && record.maybe_held && (record.resident || record.placeholder);
    });
    if (!is_held) {
        return "the list of held values has a record that is evicted or not marked";
    }
    std::size_t marked = 0;
    for (Storage* each = first; each != nullptr; each = each->next) {
        const StorageRecord& record = record_of(*each);
        marked += record.maybe_held ? 1U : 0U;
        const AddressEntry* entry =
            record.address == nullptr ? nullptr : table.find(record.address);
        if (record.address != nullptr && (entry == nullptr || entry->record != &record)) {
            return "a record's address leads to another entry of the address table, or to none";
        }
        if (!record.resident && !record.placeholder && record.address != nullptr) {
            return "an evicted record has an address";
        }
    }
    return marked == listed ? nullptr : "a record marked as held is not in the list";
}

}  // namespace rekindle
