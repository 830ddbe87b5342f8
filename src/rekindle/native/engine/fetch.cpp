// The part of `Engine` that swaps values in from host memory.
#include <algorithm>
#include <cstddef>

#include "engine.h"

namespace rekindle {

namespace {

constexpr double LEFT_FREE = 1.0 / 16;  // Fraction of the budget that prefetching leaves free.
// Largest fraction of the budget for sources that are swapped in before their use.
constexpr double AHEAD = 1.0 / 16;

}  // namespace

// Return true if the evicted `value` should be restored from its host copy. Return false if there
// is none or recomputation is faster.
bool Engine::copies(const Value& value) const {
    const Storage& storage = *value.storage;
    if (host == nullptr || !storage.on_host || storage.resident) {
        return false;
    }
    if (host->only || !storage.replayable) {
        return true;
    }
    const Nanoseconds waiting = host->link.waiting_now(storage.nbytes, clock);
    return waiting <= climb_ns(value, waiting);
}

// Return a lower bound of the time (ns) to recompute `value`, including swap-ins of its inputs. The
// sum stops once it reaches `limit`.
Nanoseconds Engine::climb_ns(const Value& value, Nanoseconds limit) const {
    Nanoseconds total = value.call->cost;
    std::vector<const Call*> calls{value.call};
    std::vector<const Call*> stack{value.call};
    while (!stack.empty() && total < limit) {
        const Call& call = *stack.back();
        stack.pop_back();
        for (const Edge& edge : call.inputs()) {
            const Value& source = *edge.value;
            if (source.defined || std::ranges::find(calls, source.call) != calls.end()) {
                continue;
            }
            calls.push_back(source.call);
            if (source.storage->on_host) {
                total += host->link.in_ns(source.storage->nbytes);
            } else {
                total += source.call->cost;
                stack.push_back(source.call);
            }
        }
    }
    return total;
}

// Swap `storage` in. early: before anything reads it. If the performer fails, the storage counts as
// evicted.
void Engine::swap_in(Storage& storage, bool early) {
    const std::uint64_t visits = visits_;
    make_room(storage.nbytes, storage.root.call);
    const bool comes = storage.on_host && !storage.resident && !storage.dissolved;
    if (visits != visits_ && !comes) {  // another thread swapped the storage in or freed it
        return;
    }
    note(Entry::Kind::swap_in, storage.id);
    performer_.swap_in(storage, early);
    if (!storage.on_host) {
        return;
    }
    host->swapped_in += storage.nbytes;
    host->link.fetch(storage.nbytes, clock);
    memory += storage.nbytes;
    raise_peak();
    appear(storage);
    chooser_->returned(storage);
    classify(storage);
}

void Engine::swap_in_failed(Storage& storage) {
    note(Entry::Kind::swap_in_failed, storage.id, 0, Entry::NESTED);
    forget_copy(storage);
}

// Forget the host copy of `storage`, which is not in memory.
void Engine::forget_copy(Storage& storage) {
    chooser_->returned(storage);
    host->drop(storage);
    if (storage.replayable) {
        reprice(storage);
        chooser_->evicted(storage);
    }
}

void Engine::copy_lost(Storage& storage) {
    if (host == nullptr || !storage.on_host) {
        return;
    }
    note(Entry::Kind::copy_lost, storage.id, 0, nesting_ != 0 ? Entry::NESTED : 0);
    const Event event(*this);
    for (Moves* moves : {&host->saving, &host->coming}) {
        if (moves->take(storage)) {
            unlock_quietly(storage);
        }
    }
    const auto is_it = [&](const Ref<Storage>& each) { return each.get() == &storage; };
    if (std::ranges::any_of(host->discarded, is_it)) {
        host->drop(storage);
        std::erase_if(host->discarded, is_it);
    } else if (storage.resident) {
        host->drop(storage);
        renew(storage);
    } else {
        forget_copy(storage);
    }
    host->limit = host->nbytes;
}

void Engine::fetch(Storage& storage) {
    if (!storage.on_host || storage.resident) {
        return;
    }
    note_event(Entry::Kind::fetch, storage.id);
    const Event event(*this);
    storage.last_access = clock;
    swap_in(storage, true);
}

void Engine::prefetch(Bytes room) {
    if (host == nullptr) {
        return;
    }
    note_event(Entry::Kind::prefetch, -1, room);
    const Event event(*this);
    unlock_prefetched(false);
    while (!planned_ && host->link.idle_in(clock)) {
        Storage* storage = host->next_back(clock, !host->order.known());
        if (storage == nullptr) {
            return;
        }
        if (budget != UNLIMITED) {
            room = std::min(room, budget - memory);
            const double most = static_cast<double>(room) - static_cast<double>(budget) * LEFT_FREE;
            if (static_cast<double>(storage->nbytes) > most) {
                return;
            }
            room -= storage->nbytes;
        } else if (room != UNLIMITED) {
            // The budget is unlimited, so there is no fraction of it to leave free.
            return;
        }
        storage->last_access = clock;
        swap_in(*storage, true);
        if (storage->resident) {
            lock_quietly(*storage);
            host->coming.put(*storage, storage->last_access);
        }
    }
}

void Engine::anticipate() {
    if (host == nullptr || !host->order.known() || planned_) {
        return;
    }
    note_event(Entry::Kind::anticipate, -1);
    const Event event(*this);
    unlock_prefetched(false);
    while (Storage* storage = expected()) {
        const Ref<Storage> kept(storage);
        // NOLINTNEXTLINE(bugprone-unchecked-optional-access): it is expected, so it has one
        const std::int64_t distance = *host->order.distance(*storage);
        while (memory + storage->nbytes > budget_beside(0)) {
            Storage* victim = furthest(distance);
            if (victim == nullptr) {
                return;
            }
            send(*victim);
        }
        swap_in(*storage, true);
        if (storage->resident) {
            lock_quietly(*storage);
            host->coming.put(*storage, storage->last_access);
        }
    }
}

Storage* Engine::expected() const noexcept {
    Storage* storage = host->order.known() ? host->next_used() : nullptr;
    if (storage == nullptr || storage->nbytes > budget_beside(0)) {
        return nullptr;
    }
    Bytes ahead = 0;
    for (const auto& [coming, since] : host->coming) {
        ahead += coming->nbytes;
    }
    const double most = static_cast<double>(budget) * AHEAD;
    const bool may = ahead == 0 || static_cast<double>(ahead + storage->nbytes) <= most;
    return may ? storage : nullptr;
}

// Forget which inputs the call in progress at position `at` (not the topmost) has locked, so that
// it locks all its inputs again, one after the other. Return the storages that it had locked.
std::vector<Storage*> Engine::open_anew(std::size_t at) {
    const auto place = [](auto& stack, std::size_t index) {
        return stack.begin() + static_cast<std::ptrdiff_t>(index);
    };
    const Frame& frame = frames_[at];
    const Frame& above = frames_[at + 1];
    std::vector<Storage*> locked(place(locked_, frame.locked), place(locked_, above.locked));
    std::vector<Value*> inputs;
    for (const Edge& edge : frame.call->inputs()) {
        inputs.push_back(edge.value);
    }
    const std::size_t pending = above.pending - frame.pending;
    locked_.erase(place(locked_, frame.locked), place(locked_, above.locked));
    pending_.erase(place(pending_, frame.pending), place(pending_, above.pending));
    pending_.insert(place(pending_, frame.pending), inputs.rbegin(), inputs.rend());
    for (std::size_t i = at + 1; i < frames_.size(); ++i) {
        frames_[i].pending = frames_[i].pending + inputs.size() - pending;
        frames_[i].locked -= locked.size();
    }
    return locked;
}

// Make room for the topmost call in progress: swap out the inputs that the other calls in progress,
// from position `first` on, have locked. Each call gives up its inputs in this way only once in one
// recomputation, also if it is opened again: else the time would double with each call of a chain
// whose values the host has no room for. Return true if at least one call gave up inputs now.
bool Engine::give_up(std::size_t first, std::vector<OpId>& gave_up) {
    std::vector<std::size_t> outer;
    for (std::size_t i = first; i + 1 < frames_.size(); ++i) {
        const OpId call = frames_[i].call->id;
        if (frames_[i + 1].locked != frames_[i].locked &&
            std::ranges::find(gave_up, call) == gave_up.end()) {
            gave_up.push_back(call);
            outer.push_back(i);
        }
    }
    for (const std::size_t at : outer) {
        const std::vector<Storage*> locked = open_anew(at);
        for (Storage* storage : locked) {
            unlock_quietly(*storage);
        }
        // A storage may be in `locked` twice. The second time it is no candidate for eviction any
        // more.
        for (Storage* storage : locked) {
            if (storage->order >= 0 && !storage->on_host && host->lacks(storage->nbytes) <= 0) {
                swap_out(*storage);
            }
        }
    }
    return !outer.empty();
}

}  // namespace rekindle
