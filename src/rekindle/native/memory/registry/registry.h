// Which storages a budget knows, and where their memory is.
//
// The registry finds records by the address of their memory, binds them to memory, and learns of
// freed memory. It decides nothing: it knows no engine. `Frees` tells the engine
// what was freed.
#pragma once

#include <c10/core/StorageImpl.h>

#include "../../torch/device.h"
#include "../../torch/free_queue.h"
#include "../../torch/storage_ptr.h"
#include "../observers/observers.h"
#include "../records/records.h"
#include "counted_devices.h"
#include "held_list.h"
#include "moved_tensors.h"
#include "pending_frees.h"
#include "storage_table.h"
#include "untracked_storages.h"

namespace rekindle {

// The storages of one budget. The caller holds the session mutex.
class Registry final {
public:
    Registry(Device& device_of, Observers& told, bool assumed)
        : device(device_of), observers(told), devices(device_of, assumed) {}

    Registry(const Registry&) = delete;
    Registry& operator=(const Registry&) = delete;
    ~Registry() = default;

    // what this part is built on
    Device& device;
    Observers& observers;

    Records records;
    StorageTable table;
    HeldList held_list;
    UntrackedStorages untracked;
    // freed storages and destroyed saved-tensor handles that were not processed yet
    FreeQueue free_queue;
    PendingFrees pending;
    MovedTensors moved_tensors;
    CountedDevices devices;
    int placeholders = 0;  // number of user-held values that are evicted now

    // Return the entry of the address table for the memory of `storage_impl`, or null.
    AddressEntry* find(const c10::StorageImpl& storage_impl) noexcept {
        assert_locked();
        const void* address = address_of(storage_impl);
        return address == nullptr ? nullptr : table.find(address);
    }

    AddressEntry* find(const c10::TensorImpl& tensor) noexcept {
        return find(*tensor.unsafe_storage().unsafeGetStorageImpl());
    }

    // Return the record of the memory of `storage_impl`, or of that of a tensor. Return null if it
    // has none.
    StorageRecord* find_record(const auto& memory) noexcept {
        const AddressEntry* found = find(memory);
        return found == nullptr ? nullptr : found->record;
    }

    // Add `storage_impl` to the address table, without giving it a record. Return its bytes, or 0
    // if they are counted already.
    Bytes count(c10::StorageImpl& storage_impl, const Facts* maker);
    // Record, for snapshots, that autograd saved a tensor in `storage_impl`, while operators are
    // only counted.
    void note_saved(const c10::StorageImpl& storage_impl);

    // -- memory of records ----------------------------------------------------------------------

    // Bind `record` to `storage_impl`, whose memory has the value of the record from now on.
    void bind(StorageRecord& record, const StoragePtr& storage_impl);
    // Detach the memory of `record` from the record and return it. The caller becomes the only
    // owner of the memory.
    StoragePtr take(StorageRecord& record);
    // Transfer the memory of `before` to `after`, the record of the next version of the value.
    void transfer(StorageRecord& before, StorageRecord& after);
    // Redirect all saved-tensor handles of autograd from `before` to `after`.
    void redirect(StorageRecord& before, StorageRecord& after);
    // Release the runtime's reference to the storage of `record`. If that frees a storage without a
    // deleter hook, note the free here, because nothing else reports it.
    void drop_keeper(StorageRecord& record);
    // Evict the storage of `record`: drop the runtime's reference to its memory. The allocator does
    // not reuse the memory before the streams that still read it are done.
    void vacate(StorageRecord& record);
    // Bind the evicted `record` to the memory in `storage_impl`. That memory already has the
    // contents of the evicted value.
    void attach(StorageRecord& record, const StoragePtr& storage_impl);
    // Put the restored contents in `storage_impl` into `placeholder`, the empty storage by which
    // the program refers to the value of `record`. If the program has freed that storage, keep
    // `storage_impl` instead.
    void place(
        StorageRecord& record, const StoragePtr& storage_impl, const StoragePtr& placeholder
    );
    // Evict the value of `record`. If the program holds it, leave the program an empty placeholder
    // storage whose access raises, and return the memory of the value, else null.
    StoragePtr evict(StorageRecord& record);
    // Give the evicted value `record` an empty placeholder storage, and return it.
    StoragePtr make_placeholder_of(StorageRecord& record);
    // Forget the placeholder (empty storage) of the evicted value `record`. Return this storage if
    // the program still holds it, else null.
    StoragePtr detach_placeholder(StorageRecord& record);
    // Destroy `record`, to which nothing refers any more.
    void dispose(StorageRecord& record) noexcept;

    // -- freed memory ---------------------------------------------------------------------------

    // Take the addresses of freed storages from the free queue, and remove them from the address
    // table. Must be called before a look-up in the table: PyTorch may have given a freed address
    // to another storage. `Frees` reports the freed storages to the engine later.
    void drain();
    // Find out which storages without a deleter hook the program has freed, because nothing reports
    // their frees. If `youngest`, check only the storages added last.
    void poll_untracked(bool youngest = false);

    // Return true if there is freed memory that the engine was not told of.
    bool any_freed() const noexcept {
        return free_queue.any() || pending.any() || untracked.are_due();
    }

    // Return true if `drain` found freed memory that the engine still counts.
    bool any_gone() const noexcept { return !pending.storages.empty(); }

    // Return true if some of the freed memory that the engine still counts belonged to a value that
    // is locked in the engine, because an event uses it.
    bool any_locked_is_gone() const noexcept { return pending.any_locked(); }

    // Call `visit(address, nbytes)` for each storage on the device that has no deleter hook, so
    // that only polling shows when PyTorch frees it.
    template <class F>
    void each_on_device(F&& visit) const {
        untracked.each([&](const c10::StorageImpl& storage_impl) {
            if (storage_impl.device() == device.which() && storage_impl.data() != nullptr) {
                const auto address = reinterpret_cast<std::uintptr_t>(storage_impl.data());
                visit(
                    static_cast<Bytes>(address),
                    device.rounded(static_cast<Bytes>(storage_impl.nbytes()))
                );
            }
        });
    }

    // Drop all references to records, because the engine is about to be destroyed.
    void close();
    // Check the tables' invariants, which hold between two events, for the records that begin with
    // `first`. Return the first one violated, or null. For tests.
    const char* fault(Storage* first);

private:
    void bind_placeholder(StorageRecord& record, c10::StorageImpl& storage_impl);
    void drop_address(const void* address, AddressEntry resident);
    StoragePtr evict_keeping_placeholder(StorageRecord& record);
};

}  // namespace rekindle
