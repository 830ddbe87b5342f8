#include "held.h"

#include <algorithm>
#include <exception>
#include <ranges>
#include <utility>

#include "../../torch/raised.h"

namespace rekindle {

Held::Held(Frees& frees, Room& room)
    : engine_(frees.engine), registry_(frees.registry), frees_(frees), room_(room) {}

Held::~Held() = default;

EvictHeldLast::EvictHeldLast(Held& held) : held_(held), candidates_(held.select_held()) {
    held_.resorts_.push_back(this);
}

EvictHeldLast::~EvictHeldLast() {
    std::erase(held_.resorts_, this);
    without_throwing([&] {
        for (const Ref<Storage>& each : candidates_) {
            if (each->listed) {
                held_.engine_.set_evictable_while_held(*each, false);
            }
        }
    });
}

Reading::Reading(Held& held, StorageList storages, bool saved)
    : held_(held), storages_(std::move(storages)), saved_(saved) {
    held_.begins(*this);
}

Reading::~Reading() {
    held_.ends(*this);
}

void Held::begins(Reader& reader) {
    readers_.add(reader);
    if (resorts_.empty()) [[likely]] {
        return;
    }
    StorageList read;
    reader.note_read(read);
    for (const c10::StorageImpl* storage_impl : read) {
        StorageRecord* record = registry_.find_record(*storage_impl);
        if (record != nullptr && record->evictable_while_held) {
            engine_.set_evictable_while_held(*record, false);
        }
    }
    if (reader.reads_saved()) {
        stop_evicting_held();
    }
}

std::int64_t Held::begin_reading(const StorageList& storages, bool saved) {
    noted_.emplace(++notes_, std::make_unique<Reading>(*this, storages, saved));
    return notes_;
}

void Held::end_reading(std::int64_t number) {
    noted_.erase(number);
}

void Held::go_on() {
    for (EvictHeldLast* each : resorts_) {
        each->go_on();
    }
}

void Held::stop_evicting_held() {
    if (eviction) {
        eviction->stops();
        return;
    }
    for (Storage* each = engine_.first_storage(); each != nullptr; each = each->next) {
        if (each->evictable_while_held) {
            engine_.set_evictable_while_held(*each, false);
        }
    }
}

// Return true if the user-held value of `record` may be evicted: it suits eviction, and nothing
// reads it now.
bool Held::is_evictable(const StorageRecord& record, const StorageList& read, bool but_saved) {
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
bool Held::note_all_read(StorageList& read) const {
    bool saved = false;
    readers_.each([&](const Reader& reader) {
        reader.note_read(read);
        saved = saved || reader.reads_saved();
    });
    return saved;
}

void EvictHeldLast::go_on() {
    StorageList read;
    const bool but_saved = held_.note_all_read(read);
    for (const Ref<Storage>& each : candidates_) {
        const StorageRecord& record = record_of(*each);
        if (held_.evicts_last && !record.evictable_while_held &&
            Held::is_evictable(record, read, but_saved)) {
            held_.engine_.set_evictable_while_held(*each, true);
        }
    }
}

std::vector<Ref<Storage>> Held::select_held() {
    frees_.poll();
    StorageList read;
    const bool but_saved = note_all_read(read);
    std::vector<Ref<Storage>> candidates;
    registry_.held_list.each([&](StorageRecord& record) {
        if (is_evictable(record, read, but_saved)) {
            candidates.emplace_back(&record);
        }
    });
    for (const Ref<Storage>& each : candidates) {
        engine_.set_evictable_while_held(*each, true);
    }
    return candidates;
}

void Held::pin_exposed_address(c10::StorageImpl& storage_impl) {
    room_.bring_back(storage_impl);
    if (StorageRecord* record = registry_.find_record(storage_impl)) {
        const Ref<Storage> kept(record);
        // If operators have written only a part of the memory, or nothing since `zeros` made it,
        // other code may now write it.
        if (record->special.unwritten() != nullptr || (record->flags & ZEROED) != 0) {
            room_.seal(*record);
            record->clear_flags();
        }
        pin_while_held(*record);
    }
}

void Held::pin_while_held(StorageRecord& record) {
    frees_.events.about_to_write(record);
    record.read_unseen = true;
    record.suits_held_eviction = false;
    if (record.evictable_while_held) {
        engine_.set_evictable_while_held(record, false);
    }
}

void Held::bring_all_back() {
    evicts_last = false;
    frees_.process_pending();
    if (eviction) {
        eviction->close();
    }
    std::exception_ptr failure;
    if (frees_.events.swapper != nullptr) {
        // A copy in progress holds its memory, and nothing would wait for it later.
        try {
            frees_.events.swapper->wait_for_all();
        } catch (const std::exception&) {
            failure = std::current_exception();
        }
        frees_.process_pending();
    }
    if (registry_.placeholders != 0) {
        if (const std::exception_ptr other = restore_all_placeholders(); !failure) {
            failure = other;
        }
    }
    forget_recipes();
    if (failure) {
        std::rethrow_exception(failure);
    }
}

// Restore all user-held values that are evicted. Return the first error, or null.
std::exception_ptr Held::restore_all_placeholders() {
    std::vector<Ref<Storage>> missing;
    for (Storage* each = engine_.first_storage(); each != nullptr; each = each->next) {
        if (record_of(*each).placeholder && !record_of(*each).lost) {
            missing.emplace_back(each);
        }
    }
    const Bytes peak = engine_.peak;
    std::exception_ptr failure;
    bool interrupted = false;
    // Try each value a second time: Ctrl-C or an error that passes must not cost one. A value that
    // cannot be restored then stays evicted, and an access to it raises an error.
    for (int times = 0; times < 2 && (times == 0 || failure); ++times) {
        for (const Ref<Storage>& each : missing) {
            try {
                use_in_any_case(record_of(*each));
            } catch (const std::exception& error) {
                if (!failure || (!interrupted && ends_the_program(error))) {
                    failure = std::current_exception();
                    interrupted = ends_the_program(error);
                }
            }
        }
    }
    frees_.process_pending();
    engine_.budget = UNLIMITED;
    engine_.peak = peak;
    return failure;
}

// Restore the value of `record`. If it does not fit, raise the budget only by as much as needed, so
// that temporary values of the recomputation are still evicted.
void Held::use_in_any_case(StorageRecord& record) {
    while (true) {
        // The program may have freed the storage of this value meanwhile. Then it need not be
        // restored.
        frees_.process_pending();
        if (!record.placeholder) {
            return;
        }
        try {
            room_.use(record);
        } catch (const OutOfBudgetError& shortage) {
            engine_.budget = std::max(engine_.budget + 1, shortage.memory + shortage.needed);
        }
    }
}

// Drop the recipes of user-held values that no value saved by autograd needs: the budget has ended,
// so these values stay in memory. Their recipes would keep the values that they read, such as the
// batch of a step, for as long as the program holds a result.
void Held::forget_recipes() {
    std::vector<Ref<Storage>> all;
    all.reserve(engine_.n_storages());
    for (Storage* each = engine_.first_storage(); each != nullptr; each = each->next) {
        all.emplace_back(each);
    }
    // The newest first, because a value that was read is needed until its reader has no recipe.
    for (const Ref<Storage>& each : all | std::views::reverse) {
        const bool forgettable =
            each->listed && each->held && each->replayable && !each->consumed();
        if (forgettable && may_forget(record_of(*each))) {
            room_.seal(record_of(*each));
        }
    }
    for (const Ref<Storage>& each : all) {
        if (each->listed && each->dead() && each->resident && each->replayable) {
            engine_.lock(*each);
            frees_.events.perform([&] { engine_.unlock(*each); });
        }
    }
    frees_.let_go_of_idle();
}

}  // namespace rekindle
