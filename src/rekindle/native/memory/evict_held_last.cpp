// Evicts user-held values as a last resort, and restores them; see the note in evict_held_last.h.
#include "evict_held_last.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "held_eviction.h"

namespace rekindle {

// Results that are integers or single numbers are never evictable: they may be lengths or indices,
// which composite functions read directly, before any of their operators runs.
bool is_returnable(const c10::TensorImpl& tensor) {
    const auto dtype = c10::typeMetaToScalarType(tensor.dtype());
    return (c10::isFloatingType(dtype) || c10::isComplexType(dtype)) && tensor.dim() != 0;
}

// Values made by `empty` or `zeros` that no operator has written are never evicted while the
// program holds them: other code may have written them unseen (R4, sources). `flags` is not 0 for
// such values.
bool may_return(const StorageRecord& record) noexcept {
    return record.suits_held_eviction && record.replayable && record.listed && record.flags == 0;
}

EvictHeldLast::EvictHeldLast(Driver& driver) : driver_(driver), candidates_(driver.select_held()) {
    driver_.resorts.push_back(this);
}

EvictHeldLast::~EvictHeldLast() {
    std::erase(driver_.resorts, this);
    without_throwing([&] {
        for (const Ref<Storage>& each : candidates_) {
            if (each->listed) {
                driver_.engine.set_evictable_while_held(*each, false);
            }
        }
    });
}

Reading::Reading(Driver& driver, StorageList storages, bool saved)
    : driver_(driver), storages_(std::move(storages)), saved_(saved) {
    driver_.begins(*this);
}

Reading::~Reading() {
    driver_.ends(*this);
}

void Driver::begins(Reader& reader) {
    readers.add(reader);
    if (resorts.empty()) [[likely]] {
        return;
    }
    StorageList read;
    reader.note_read(read);
    for (const c10::StorageImpl* storage_impl : read) {
        const AddressEntry* found = registry.find(*storage_impl);
        if (found != nullptr && found->record != nullptr && found->record->evictable_while_held) {
            engine.set_evictable_while_held(*found->record, false);
        }
    }
    if (reader.reads_saved()) {
        stop_evicting_held();
    }
}

void Driver::stop_evicting_held() {
    if (held_eviction) {
        held_eviction->stops();
        return;
    }
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        if (each->evictable_while_held) {
            engine.set_evictable_while_held(*each, false);
        }
    }
}

// Return true if the user-held value of `record` may be evicted: it suits eviction, and nothing
// reads it now.
bool Driver::is_evictable(const StorageRecord& record, const StorageList& read, bool but_saved) {
    // Include values that are evicted now (their storage is an empty placeholder), because the
    // recomputation of another value may restore them.
    const bool there = record.resident || record.placeholder;
    const bool may = may_return(record) && there && !record.pinned &&
                     !record.special.is_external() && record.nbytes != 0 &&
                     (!but_saved || record.references == 0);
    const StoragePtr storage_impl = may ? record.at() : StoragePtr();
    return storage_impl && std::ranges::find(read, storage_impl.get()) == read.end();
}

// Add to `read` the storages that running operators and other registered readers use. Return true
// if some reader may also read any value that autograd saved.
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
    for (const Ref<Storage>& each : candidates_) {
        const StorageRecord& record = record_of(*each);
        if (driver_.evicts_held_last && !record.evictable_while_held &&
            Driver::is_evictable(record, read, but_saved)) {
            driver_.engine.set_evictable_while_held(*each, true);
        }
    }
}

std::vector<Ref<Storage>> Driver::select_held() {
    frees.poll();
    StorageList read;
    const bool but_saved = note_all_read(read);
    std::vector<Ref<Storage>> candidates;
    registry.held_list.each([&](StorageRecord& record) {
        if (is_evictable(record, read, but_saved)) {
            candidates.emplace_back(&record);
        }
    });
    for (const Ref<Storage>& each : candidates) {
        engine.set_evictable_while_held(*each, true);
    }
    return candidates;
}

void Driver::pin_exposed_address(c10::StorageImpl& storage_impl) {
    room.bring_back(storage_impl);
    const AddressEntry* found = registry.find(storage_impl);
    if (found != nullptr && found->record != nullptr) {
        StorageRecord& record = *found->record;
        const Ref<Storage> kept(&record);
        // If operators have written only a part of the memory, other code may now write the rest.
        if (record.special.unwritten() != nullptr) {
            room.seal(record);
            record.clear_flags();
        }
        pin_while_held(record);
    }
}

void Driver::pin_while_held(StorageRecord& record) {
    record.read_unseen = true;
    record.suits_held_eviction = false;
    if (record.evictable_while_held) {
        engine.set_evictable_while_held(record, false);
    }
}

// At the end of the budget, restore all evicted user-held values, even if they do not fit.
void Driver::bring_all_back() {
    evicts_held_last = false;
    frees.process_pending();
    if (held_eviction) {
        held_eviction->close();
    }
    const std::exception_ptr failure =
        registry.placeholders == 0 ? std::exception_ptr() : restore_all_placeholders();
    if (held_eviction) {
        held_eviction->forget_recipes();
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
}

// Restore all user-held values that are evicted. Return the first error, or null.
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
            // This value could not be restored. It stays evicted, and an access to it raises an
            // error.
            if (!failure || (!interrupted && ends_the_program(error))) {
                failure = std::current_exception();
                interrupted = ends_the_program(error);
            }
        }
    }
    frees.process_pending();
    engine.budget = UNLIMITED;
    engine.peak = peak;
    return failure;
}

// Restore the value of `record`. If it does not fit, raise the budget only by as much as needed, so
// that temporary values of the recomputation are still evicted.
void Driver::use_in_any_case(StorageRecord& record) {
    while (true) {
        // The program may have freed the storage of this value meanwhile. Then it need not be
        // restored.
        frees.process_pending();
        if (!record.placeholder) {
            return;
        }
        try {
            room.use(record);
        } catch (const OutOfBudgetError& shortage) {
            engine.budget = std::max(engine.budget + 1, shortage.memory + shortage.needed);
        }
    }
}

}  // namespace rekindle
