// Evicts user-held values as a last resort, and restores them; see the note in held.h.
#include "held.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "any_time.h"

namespace rekindle {

// Integers may be lengths or indices, which composite functions read before any of their operators
// runs. The same is true of single numbers.
bool is_returnable(const c10::TensorImpl& tensor) {
    const auto dtype = c10::typeMetaToScalarType(tensor.dtype());
    return (c10::isFloatingType(dtype) || c10::isComplexType(dtype)) && tensor.dim() != 0;
}

// A value made without contents, and not written since by an operator, may have been written unseen
// (R4, sources).
bool may_return(const Record& record) noexcept {
    return record.returnable && record.replayable && record.listed && record.flags == 0;
}

LastResort::LastResort(Driver& driver) : driver_(driver), lent_(driver.lend()) {
    ++driver_.lending;
    driver_.resorts.push_back(this);
}

LastResort::~LastResort() {
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

Reading::Reading(Driver& driver, Homes homes, bool saved)
    : driver_(driver), homes_(std::move(homes)), saved_(saved) {
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
    Homes read;
    reader.note_read(read);
    for (const c10::StorageImpl* home : read) {
        const Resident* found = resident_at(*home);
        if (found != nullptr && found->record != nullptr && found->record->returns) {
            engine.let_return(*found->record, false);
        }
    }
    if (reader.reads_saved()) {
        stops_lending();
    }
}

void Driver::stops_lending() {
    if (any_time) {
        any_time->stops();
        return;
    }
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        if (each->returns) {
            engine.let_return(*each, false);
        }
    }
}

// Return true if `record` may be evicted while the program holds it, because nothing reads it.
bool Driver::can_be_lent(const Record& record, const Homes& read, bool but_saved) {
    // A placeholder may be restored together with another value.
    const bool there = record.resident || record.husk;
    const bool may = may_return(record) && there && !record.pinned && !record.foreign &&
                     record.nbytes != 0 && (!but_saved || record.references == 0);
    const Home home = may ? record.at() : Home();
    return home && std::ranges::find(read, home.get()) == read.end();
}

// Add the storages that readers use. Return true if a reader may also read all saved values.
bool Driver::note_all_read(Homes& read) const {
    bool saved = false;
    readers.each([&](const Reader& reader) {
        reader.note_read(read);
        saved = saved || reader.reads_saved();
    });
    return saved;
}

void LastResort::go_on() {
    Homes read;
    const bool but_saved = driver_.note_all_read(read);
    for (const Ref<Storage>& each : lent_) {
        const Record& record = record_of(*each);
        if (driver_.lends && !record.returns && Driver::can_be_lent(record, read, but_saved)) {
            driver_.engine.let_return(*each, true);
        }
    }
}

std::vector<Ref<Storage>> Driver::lend() {
    poll();
    Homes read;
    const bool but_saved = note_all_read(read);
    std::vector<Ref<Storage>> lent;
    for (Record* record = first_held_; record != nullptr; record = record->held_after) {
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
bool Driver::leave_a_husk(Record& record) {
    if (!record.held || !record.returns) {
        return false;
    }
    const Home home = record.at();
    if (!home || !record.is_held()) {  // freed just now, maybe by another thread
        not_held(record);
        vacate(record);
        record.husk = true;  // without a storage of the program
        ++husks;
        gone_.emplace_back(&record);
        return true;
    }
    // Streams that still read the memory are waited for before the allocator reuses it.
    if (device.queues()) {
        device.keep_until_read(*home, record.order.readers);
    }
    table_.take(record.address);
    record.owned.reset();
    become_husk(*home);
    collect();  // remove the previous entry for its address
    record.home = WeakHome(home);
    record.address = address_of(*home);
    record.husk = true;
    ++husks;
    settle_at(record.address, &record, record.nbytes, record.maker, nullptr);
    return true;
}

// Detach the placeholder of `record`. Return it if the program still has it.
Home Driver::take_husk(Record& record) {
    if (!record.husk) {
        return {};
    }
    record.husk = false;
    --husks;
    if (record.address != nullptr) {
        table_.take(std::exchange(record.address, nullptr));
    }
    back_.emplace_back(&record);
    return record.home.lock();
}

// Put the value of `record` from `home` into its placeholder `husk`, if the program has that still.
void Driver::arrive(Record& record, const Home& home, const Home& husk) {
    if (husk) {
        if (record.address != nullptr) {
            table_.take(record.address);
        }
        fill_husk(*husk, *home);
        record.owned = husk;  // the program may free it before anything reads it
    } else {
        // The program has no placeholder any more: forget its tensor.
        record.version = Version();
        record.unwatched = false;
        record.origin = no_tensor();
        record.owned = home;
    }
    settle_in(record, record.owned);
}

// Give the sole ownership of a restored value back to the program, unless autograd refers to it
// too.
void Driver::hand_back(Record& record) {
    if (record.resident && record.replayable) {
        maybe_held(record);
    }
    if (record.resident) {
        disown(record);
    }
}

void Driver::bring_back(const c10::StorageImpl& home) {
    const Resident* found = resident_at(home);
    if (found != nullptr && found->record != nullptr && found->record->husk) {
        use(*found->record);
    }
}

void Driver::keep_there(c10::StorageImpl& home) {
    bring_back(home);
    const Resident* found = resident_at(home);
    if (found != nullptr && found->record != nullptr) {
        stays(*found->record);
    }
}

void Driver::stays(Record& record) {
    record.read_unseen = true;
    record.returnable = false;
    if (record.returns) {
        engine.let_return(record, false);
    }
}

// Restore values even if they do not fit: the budget is over.
void Driver::bring_all_back() {
    lends = false;
    settle();
    if (any_time) {
        any_time->close();
    }
    const std::exception_ptr failure = husks == 0 ? std::exception_ptr() : fill_all_husks();
    if (any_time) {
        any_time->forget_recipes();
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
}

// Restore all placeholders. Return the first error, or null.
std::exception_ptr Driver::fill_all_husks() {
    std::vector<Ref<Storage>> missing;
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        if (record_of(*each).husk) {
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
    settle();
    engine.budget = UNLIMITED;
    engine.peak = peak;
    return failure;
}

// Restore `record`. Raise the budget as needed, so that temporary values can be evicted.
void Driver::use_in_any_case(Record& record) {
    while (true) {
        // The program may have freed it meanwhile.
        settle();
        if (!record.husk) {
            return;
        }
        try {
            use(record);
        } catch (const Shortage& shortage) {
            engine.budget = std::max(engine.budget + 1, shortage.memory + shortage.needed);
        }
    }
}

}  // namespace rekindle
