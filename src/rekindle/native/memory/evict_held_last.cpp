// Evicts user-held values as a last resort, and restores them; see the note in evict_held_last.h.
#include "evict_held_last.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "held_eviction.h"

namespace rekindle {

// Integers and single numbers may be lengths or indices, which composite functions read directly,
// before any of their operators runs.
bool is_returnable(const c10::TensorImpl& tensor) {
    const auto dtype = c10::typeMetaToScalarType(tensor.dtype());
    return (c10::isFloatingType(dtype) || c10::isComplexType(dtype)) && tensor.dim() != 0;
}

// If no operator has written a value made by `empty` or `zeros`, other code may have written it
// unseen (R4, sources). `flags` is not 0 for such values.
bool may_return(const StorageRecord& record) noexcept {
    return record.returnable && record.replayable && record.listed && record.flags == 0;
}

EvictHeldLast::EvictHeldLast(Driver& driver) : driver_(driver), lent_(driver.select_held()) {
    ++driver_.lending;
    driver_.resorts.push_back(this);
}

EvictHeldLast::~EvictHeldLast() {
    --driver_.lending;
    std::erase(driver_.resorts, this);
    without_throwing([&] {
        for (const Ref<Storage>& each : lent_) {
            if (each->listed) {
                driver_.engine.let_return(*each, false);
            }
        }
    });
}

Reading::Reading(Driver& driver, StorageList storages, bool saved)
    : driver_(driver), homes_(std::move(storages)), saved_(saved) {
    driver_.begins(*this);
}

Reading::~Reading() {
    driver_.ends(*this);
}

void Driver::begins(Reader& reader) {
    readers.add(reader);
    if (lending == 0) {
        return;
    }
    StorageList read;
    reader.note_read(read);
    for (const c10::StorageImpl* storage_impl : read) {
        const AddressEntry* found = find_by_address(*storage_impl);
        if (found != nullptr && found->record != nullptr && found->record->returns) {
            engine.let_return(*found->record, false);
        }
    }
    if (reader.reads_saved()) {
        stops_lending();
    }
}

void Driver::stops_lending() {
    if (held_eviction) {
        held_eviction->stops();
        return;
    }
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        if (each->returns) {
            engine.let_return(*each, false);
        }
    }
}

// Return true if `record` may be evicted while the program holds it, because it is not being read.
bool Driver::can_be_lent(const StorageRecord& record, const StorageList& read, bool but_saved) {
    // A placeholder may be restored together with another value.
    const bool there = record.resident || record.placeholder;
    const bool may = may_return(record) && there && !record.pinned && !record.external &&
                     record.nbytes != 0 && (!but_saved || record.references == 0);
    const StoragePtr storage_impl = may ? record.at() : StoragePtr();
    return storage_impl && std::ranges::find(read, storage_impl.get()) == read.end();
}

// Add to `read` the storages that readers use. Return true if some reader may also read any value
// that autograd saved.
bool Driver::note_all_read(StorageList& read) const {
    bool saved = false;
    readers.each([&](const Reader& reader) {
        reader.note_read(read);
        saved = saved || reader.reads_saved();
    });
    return saved;
}

void EvictHeldLast::go_on() {
    StorageList read;
    const bool but_saved = driver_.note_all_read(read);
    for (const Ref<Storage>& each : lent_) {
        const StorageRecord& record = record_of(*each);
        if (driver_.lends && !record.returns && Driver::can_be_lent(record, read, but_saved)) {
            driver_.engine.let_return(*each, true);
        }
    }
}

std::vector<Ref<Storage>> Driver::select_held() {
    poll();
    StorageList read;
    const bool but_saved = note_all_read(read);
    std::vector<Ref<Storage>> lent;
    for (StorageRecord* record = first_held_; record != nullptr; record = record->held_after) {
        if (can_be_lent(*record, read, but_saved)) {
            lent.emplace_back(record);
        }
    }
    for (const Ref<Storage>& each : lent) {
        engine.let_return(*each, true);
    }
    return lent;
}

// Evict `record` if the program may hold it, leaving a placeholder. Return false if it does not.
bool Driver::evict_keeping_placeholder(StorageRecord& record) {
    if (!record.held || !record.returns) {
        return false;
    }
    const StoragePtr storage_impl = record.at();
    // The program freed the storage just now, maybe in another thread.
    if (!storage_impl || !record.is_held()) {
        not_held(record);
        vacate(record);
        record.placeholder = true;  // a placeholder whose storage the program has freed
        ++placeholders;
        gone_.emplace_back(&record);
        return true;
    }
    // The allocator does not reuse the memory before the streams that still read it are done.
    if (device.queues()) {
        device.keep_until_read(*storage_impl, record.id);
    }
    table_.take(record.address);
    record.keeper.reset();
    make_placeholder(*storage_impl);
    drain_free_queue();  // remove the previous entry for the placeholder's address
    record.storage_impl = WeakStorage(storage_impl);
    record.address = address_of(*storage_impl);
    record.placeholder = true;
    ++placeholders;
    settle_at(record.address, &record, record.nbytes, record.maker, nullptr);
    return true;
}

// Detach the placeholder storage from `record`. Return it if the program still holds it, else null.
StoragePtr Driver::detach_placeholder(StorageRecord& record) {
    if (!record.placeholder) {
        return {};
    }
    record.placeholder = false;
    --placeholders;
    if (record.address != nullptr) {
        table_.take(std::exchange(record.address, nullptr));
    }
    back_.emplace_back(&record);
    return record.storage_impl.lock();
}

// Move the value of `record` from `storage_impl` into its placeholder, the program's own storage,
// unless the program has freed it.
void Driver::arrive(
    StorageRecord& record, const StoragePtr& storage_impl, const StoragePtr& placeholder
) {
    if (placeholder) {
        if (record.address != nullptr) {
            table_.take(record.address);
        }
        restore_into(*placeholder, *storage_impl);
        record.keeper = placeholder;  // the program may free its storage before the value is read
    } else {
        // The program has freed the placeholder: forget the program's tensor.
        record.version = Version();
        record.unwatched = false;
        record.origin = no_tensor();
        record.keeper = storage_impl;
    }
    bind_storage(record, record.keeper);
}

// Drop our reference to the restored storage, so that the program is its only owner, unless
// autograd refers to the value too.
void Driver::hand_back(StorageRecord& record) {
    if (record.resident && record.replayable) {
        maybe_held(record);
    }
    if (record.resident) {
        disown(record);
    }
}

void Driver::bring_back(const c10::StorageImpl& storage_impl) {
    const AddressEntry* found = find_by_address(storage_impl);
    if (found != nullptr && found->record != nullptr && found->record->placeholder) {
        use(*found->record);
    }
}

void Driver::pin_exposed_address(c10::StorageImpl& storage_impl) {
    bring_back(storage_impl);
    const AddressEntry* found = find_by_address(storage_impl);
    if (found != nullptr && found->record != nullptr) {
        pin_while_held(*found->record);
    }
}

void Driver::pin_while_held(StorageRecord& record) {
    record.read_unseen = true;
    record.returnable = false;
    if (record.returns) {
        engine.let_return(record, false);
    }
}

// At the end of the budget, restore all user-held values, even if they do not fit.
void Driver::bring_all_back() {
    lends = false;
    process_pending();
    if (held_eviction) {
        held_eviction->close();
    }
    const std::exception_ptr failure =
        placeholders == 0 ? std::exception_ptr() : restore_all_placeholders();
    if (held_eviction) {
        held_eviction->forget_recipes();
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
}

// Restore all placeholders. Return the first error, or null.
std::exception_ptr Driver::restore_all_placeholders() {
    std::vector<Ref<Storage>> missing;
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        if (record_of(*each).placeholder) {
            missing.emplace_back(each);
        }
    }
    const Bytes peak = engine.peak;
    std::exception_ptr failure;
    bool interrupted = false;
    for (const Ref<Storage>& each : missing) {
        try {
            use_in_any_case(record_of(*each));
        } catch (const std::exception& error) {
            // The value stays evicted, and an access to it raises.
            if (!failure || (!interrupted && ends_the_program(error))) {
                failure = std::current_exception();
                interrupted = ends_the_program(error);
            }
        }
    }
    process_pending();
    engine.budget = UNLIMITED;
    engine.peak = peak;
    return failure;
}

// Restore `record`. Where it does not fit, raise the budget only as far as needed, so that
// temporary values are still evicted.
void Driver::use_in_any_case(StorageRecord& record) {
    while (true) {
        // The program may have freed it meanwhile.
        process_pending();
        if (!record.placeholder) {
            return;
        }
        try {
            use(record);
        } catch (const OutOfBudgetError& shortage) {
            engine.budget = std::max(engine.budget + 1, shortage.memory + shortage.needed);
        }
    }
}

}  // namespace rekindle
