#include "room.h"

#include <vector>

#include "../../torch/backward.h"

namespace rekindle {

void refuse_lost(const StorageRecord& record) {
    if (record.lost) [[unlikely]] {
        throw LostValueError(record.site(), record.nbytes);
    }
}

bool may_forget(StorageRecord& record) {
    bool may = true;
    each_maker(record, [&](Call& call) {
        for (const Value* value : call.outputs()) {
            const Storage& made = *value->storage;
            may = may && (made.resident || (made.dead() && !made.consumed()));
        }
    });
    return may;
}

std::vector<Ref<Storage>> dead_sources(const Engine& engine) {
    std::vector<Ref<Storage>> found;
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        const bool source = each->consumed() && each->resident && !each->replayable;
        if (source && each->references == 0 && !record_of(*each).is_held()) {
            found.emplace_back(each);
        }
    }
    return found;
}

Bytes bytes_of(std::span<const Ref<Storage>> storages) {
    Bytes total = 0;
    for (const Ref<Storage>& each : storages) {
        total += each->nbytes;
    }
    return total;
}

void Room::make_room(Bytes needed, const char* who) {
    assert_locked();
    needed += kept_back(needed);
    observers_.lost.add([&] {
        if (events_.swapper == nullptr) {
            evict_for(needed, who);
        } else {
            make_room_and_wait(needed, who);
        }
    });
}

// After `needed` bytes had no room, find storages that the program freed, restore the original
// budget, and release sources (values without a recipe) that only recipes need. Return false if all
// that changed nothing.
bool Room::finds_more(Bytes needed) {
    const Bytes before = engine_.memory;
    frees_.look_at_all();
    const bool less = backoff.as_given(engine_.budget);
    const Bytes missing = needed + engine_.memory + engine_.in_flight - engine_.budget;
    return release_recompute_sources(missing) || engine_.memory < before || less;
}

// Evict values until `needed` bytes fit. If that fails, find more room and try once more.
void Room::evict_for(Bytes needed, const char* who) {
    frees_.poll();
    try {
        events_.perform([&] { engine_.make_room(needed); }, who);
    } catch (const OutOfBudgetError& shortage) {
        if (!finds_more(shortage.needed)) {
            throw;
        }
        events_.perform([&] { engine_.make_room(needed); }, who);
    }
}

// Evict values until `needed` bytes fit, and wait until the swap-outs have really freed the memory.
void Room::make_room_and_wait(Bytes needed, const char* who) {
    evict_for(needed, who);
    while (!events_.swapper->has_room(needed + engine_.in_flight)) {
        // A swap-out failed, so its value stayed in memory. Evict other values.
        evict_for(needed, who);
    }
}

void Room::clear(Bytes wanted) {
    assert_locked();
    const Bytes most = engine_.budget - engine_.in_flight - wanted;
    if (engine_.memory <= most) {
        return;
    }
    observers_.lost.add([&] {
        frees_.poll();
        events_.perform([&] { engine_.shrink(most); });
        if (engine_.memory > most && release_recompute_sources(engine_.memory - most)) {
            events_.perform([&] { engine_.shrink(most); });
        }
        if (events_.swapper) {
            events_.swapper->wait_for(wanted + engine_.in_flight);
        }
    });
}

void Room::evict_all() {
    frees_.poll();
    events_.perform([&] { engine_.shrink(0); });
}

bool Room::release_recompute_sources(Bytes least) {
    if (observers_.recorded) {
        return false;
    }
    const Bytes before = engine_.memory;
    const std::vector<Ref<Storage>> sources = dead_sources(engine_);
    if (bytes_of(sources) < least) {
        return false;
    }
    std::vector<Ref<Storage>> found;
    for (const Ref<Storage>& source : sources) {
        engine_.graph.ends(*source, found);
    }
    for (const Ref<Storage>& each : found) {
        StorageRecord& record = record_of(*each);
        if (record.listed && record.replayable && may_forget(record)) {
            seal(record);
        }
    }
    frees_.let_go_of_idle();
    frees_.process_pending();
    return engine_.memory < before;
}

Bytes Room::bytes_to_restore(const StorageRecord& record) const {
    if (record.on_host) {
        return record.nbytes;
    }
    const Recipe& recipe = recipe_of(*record.root.call);
    Bytes total = recipe.nbytes + engine_.workspace_of(recipe);
    for (const Edge& edge : recipe.inputs()) {
        total += edge.value->defined ? 0 : edge.value->storage->nbytes;
    }
    return total;
}

bool Room::is_without_room(const StorageRecord& record) const {
    if (!sliced_call_of(record)) {
        return false;
    }
    Bytes total = bytes_to_restore(record);
    for (const Edge& edge : record.root.call->inputs()) {
        // what the recomputation reads is not evicted for it, even if it is a candidate
        const Storage& input = *edge.value->storage;
        total += input.resident && input.order >= 0 ? input.nbytes : 0;
    }
    return !engine_.has_room(total);
}

void Room::use(StorageRecord& record) {
    refuse_lost(record);
    const Ref<Storage> kept(&record);
    events_.finish_swap_in(record);
    const auto asked_for = [&] {
        bring([&] {
            if (record.listed) {  // false if the program freed the storage meanwhile
                engine_.use(record.root);
            }
        });
    };
    if (record.resident) {
        asked_for();
    } else {
        observers_.lost.add([&] {
            frees_.poll();
            if (observers_.steps != nullptr) {
                observers_.steps->about_to_access(record);
                events_.finish_swap_in(record);
            }
            asked_for();
        });
    }
    if (record.listed) {
        registry_.held_list.add(record);
        // During CUDA graph capture it is impossible to wait for a copy to the host, so wait now.
        events_.finish_swap_out(record);
    }
}

void Room::pin(StorageRecord& record) {
    refuse_lost(record);
    const Ref<Storage> kept(&record);
    events_.finish_swap_in(record);
    const auto pinned = [&] { bring([&] { engine_.pin(record.root); }); };
    if (record.resident) {
        pinned();
    } else {
        observers_.lost.add([&] {
            frees_.poll();
            pinned();
        });
    }
    if (record.consumed()) {
        record.own();
    }
    registry_.held_list.remove(record);
}

void Room::seal(StorageRecord& record) {
    events_.perform([&] { engine_.seal(record); });
}

void Room::bring_back(const c10::StorageImpl& storage_impl) {
    StorageRecord* record = registry_.find_record(storage_impl);
    if (record != nullptr && (record->placeholder || record->coming)) {
        use(*record);
    }
}

bool Room::anticipates() const noexcept {
    // On a CPU, each read is waited for, so it is not begun before the value is read.
    return device_.queues() && engine_.expected() != nullptr;
}

void Room::swap_ahead() {
    const bool ordered = engine_.host->order.known() && device_.queues();
    const bool may =
        events_.swapper->ahead && engine_.budget != UNLIMITED && (!stepping.is_set() || ordered);
    if (!may || device_.is_capturing()) {
        return;
    }
    const bool full = engine_.memory > engine_.budget / 2;
    if (full && !stepping.is_set() && !engine_.is_planned() &&
        engine_.host->link.idle_out(engine_.clock)) {
        // find values that the program no longer holds, because only those may be copied ahead of
        // time
        frees_.poll();
    }
    const auto copy = [&] {
        if (ordered) {
            engine_.anticipate();
        }
        if (stepping.is_set()) {
            return;
        }
        if (!in_backward_pass()) {
            engine_.ahead();
        } else if (engine_.host->link.waiting_out(0, engine_.clock) == 0) {
            engine_.prefetch(engine_.budget - engine_.memory - engine_.in_flight);
        }
    };
    try {
        events_.perform(copy);
    } catch (const std::exception& error) {
        if (!is_device_oom(error)) {
            throw;
        }  // a value that does not fit is swapped in later, when the program needs it
    }
}

}  // namespace rekindle
