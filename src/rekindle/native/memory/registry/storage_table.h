// The address table of a budget: which storages count against it, by the address of their memory.
//
// The registry looks a storage up whenever an operator reads or makes it. The free queue reports
// the address of freed memory, and the registry then removes the entry.
#pragma once

#include <cstddef>
#include <utility>

#include "../../base/address_map.h"
#include "../../base/types.h"
#include "../../ops/facts.h"
#include "../records/storage_record.h"

namespace rekindle {

// Entry of the address table for one storage. Without a record, only the storage's bytes count
// against the budget: it can be neither evicted nor recomputed.
struct AddressEntry final {
    StorageRecord* record = nullptr;
    Bytes nbytes = 0;
    const Facts* maker = nullptr;
    const c10::StorageImpl* storage_impl = nullptr;  // set if the storage lacks our deleter hook
    AllocationId allocation = 0;
    bool saved = false;  // autograd saved a tensor of a storage without a record
};

// Table of storages by the address of their memory. Each record whose value is in memory has one
// entry. The caller holds the session mutex.
class StorageTable final {
public:
    // Return the entry for memory at `address`, or null. The pointer is valid until the next `put`
    // or `take`.
    AddressEntry* find(const void* address) noexcept { return entries_.find(address); }

    // Set the entry for memory at `address`. A new entry gets the next allocation number; an
    // address that is already in the table keeps its number. Return the record that the entry had
    // before; null if it had none.
    StorageRecord* put(
        const void* address,
        StorageRecord* record,
        Bytes nbytes,
        const Facts* maker,
        const c10::StorageImpl* storage_impl
    ) {
        if (AddressEntry* there = entries_.find(address)) {
            StorageRecord* const before = there->record;
            *there = {record, nbytes, maker, storage_impl, there->allocation};
            return before;
        }
        add(address, record, nbytes, maker, storage_impl);
        return nullptr;
    }

    // The same for an address that is not in the table.
    void add(
        const void* address,
        StorageRecord* record,
        Bytes nbytes,
        const Facts* maker,
        const c10::StorageImpl* storage_impl
    ) {
        entries_.add(address, {record, nbytes, maker, storage_impl, ++allocations_});
    }

    // Remove the entry for memory at `address`, if there is one.
    void take(const void* address) noexcept { entries_.take(address); }

    // Remove the entry of `record`, whose memory was freed or passed to another record. Return the
    // entry's address; null if there was none.
    const void* take(StorageRecord& record) noexcept {
        const void* address = std::exchange(record.address, nullptr);
        if (address != nullptr) {
            entries_.take(address);
        }
        return address;
    }

    // Return the number of the newest allocation.
    AllocationId newest() const noexcept { return allocations_; }

    // Call `visit(address, entry)` for each storage in the table.
    template <class F>
    void each(F&& visit) {
        entries_.each(std::forward<F>(visit));
    }

    // Call `visit(address, entry)` for each storage in the table that has no record.
    template <class F>
    void each_counted(F&& visit) {
        entries_.each([&](const void* address, const AddressEntry& entry) {
            if (entry.record == nullptr) {
                visit(address, entry);
            }
        });
    }

private:
    AddressMap<AddressEntry> entries_;
    AllocationId allocations_ = 0;
};

}  // namespace rekindle
