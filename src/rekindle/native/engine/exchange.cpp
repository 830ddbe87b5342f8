// The part of `Ledger` that swaps values out to the host. Twin of rekindle.engine._exchange.
#include <algorithm>
#include <cstddef>
#include <utility>

#include "ledger.h"

namespace rekindle {

void Ledger::swap_with(const Swap& swap) {
    host = std::make_unique<HostMemory>(swap);
}

void Ledger::measured(std::int64_t out_bytes_per_s, std::int64_t in_bytes_per_s) {
    const std::int64_t flags = nesting_ != 0 ? Entry::NESTED : 0;
    note(Entry::Kind::measured, out_bytes_per_s, in_bytes_per_s, flags);
    host->link.measured(out_bytes_per_s, in_bytes_per_s);
}

// -- swapping out ---------------------------------------------------------------------------------

// Evict storages or swap them out until at most `nbytes` are in use.
void Ledger::send_until(Bytes nbytes) {
    while (memory > nbytes) {
        if (Storage* victim = choose(); victim != nullptr) {
            send(*victim);
        } else if (!host->saving.empty() || !host->coming.empty()) {
            // Only storages that a transfer to or from the host locks are left to evict. Wait for
            // these transfers.
            unlock_saved(true);
            unlock_prefetched(true);
        } else {
            return;
        }
    }
}

// Evict `victim`. Swap it out if that is cheaper than recomputing it, or if it has no recipe.
// Otherwise free its memory, and recompute it later.
void Ledger::send(Storage& victim) {
    if (victim.on_host && !victim.replayable && performer_.is_copy_outdated(victim)) {
        note(Entry::Kind::outdated, victim.id, 0, Entry::NESTED);
        discard(victim);
    }
    const auto pays = [&] {  // swapping it out now is cheaper than recomputing it later
        return host->only || !victim.replayable ||
               (!planned_ && host->waiting(victim, clock) < chooser_->recompute_ns(victim));
    };
    if (!victim.on_host && pays()) {
        make_host_room(victim.nbytes);
        if (host->lacks(victim.nbytes) <= 0) {
            swap_out(victim);
            return;
        }
    }
    if (victim.restorable()) {
        evict(victim);
    } else {
        refuse(victim);
    }
}

// Make room for `nbytes` on the host by discarding host copies of storages that are also in memory.
// Discard none if that does not suffice.
void Ledger::make_host_room(Bytes nbytes) {
    discard_all();
    std::vector<Storage*> spare;
    host->spare(nbytes, spare);
    for (Storage* storage : spare) {
        discard(*storage);
    }
}

void Ledger::swap_out(Storage& storage) {
    memory -= storage.nbytes;
    vanish(storage);
    host->take(storage);
    host->link.send(storage.nbytes, clock);
    reprice(storage);
    chooser_->evicted(storage);
    copy(storage, false);
}

// Let the performer start to copy `storage` to the host, and handle a failure. If `keep`, the
// storage also stays in memory.
void Ledger::copy(Storage& storage, bool keep) {
    note(Entry::Kind::swap_out, storage.id, 0, keep ? Entry::KEPT : 0);
    if (!performer_.swap_out(storage, keep) && !swap_out_failed(storage)) {
        free(storage);
    }
}

bool Ledger::swap_out_failed(Storage& storage) {
    note(Entry::Kind::swap_out_failed, storage.id, 0, nesting_ != 0 ? Entry::NESTED : 0);
    // A copy to the host ahead of the eviction failed, so the storage is still in memory.
    if (storage.resident) {
        const bool locked = host->saving.take(storage);
        host->failed(storage);
        reprice(storage);
        if (locked) {
            unlock_quietly(storage);
        } else {
            classify(storage);
        }
        return true;
    }
    chooser_->returned(storage);
    host->failed(storage);
    reprice(storage);
    if (storage.replayable) {
        chooser_->evicted(storage);
        return false;
    }
    memory += storage.nbytes;
    appear(storage);
    refuse(storage);
    return true;
}

void Ledger::written(Storage& storage) {
    if (host == nullptr || !storage.on_host || !storage.resident) {
        return;
    }
    note_event(Entry::Kind::written, storage.id);
    const Event event(*this);
    static_cast<void>(abandon_copy(storage));
    discard(storage);
}

void Ledger::step() {
    if (host != nullptr) {
        note_event(Entry::Kind::step, -1);
        host->order.step();
    }
}

Storage* Ledger::furthest(std::int64_t than) const noexcept {
    Storage* found = nullptr;
    for (Storage* each = first_; each != nullptr; each = each->next) {
        if (each->order < 0 || each->replayable) {
            continue;
        }
        if (const auto distance = host->order.distance(*each); distance && *distance > than) {
            found = each;
            than = *distance;
        }
    }
    return found;
}

// Exclude `storage` from the candidates for eviction until the host has room: it has no recipe, and
// the host has no room for its copy now.
void Ledger::refuse(Storage& storage) {
    if (!host->refuses(storage)) {
        host->refused.push_back(&storage);
    }
    classify(storage);
}

// -- copying ahead of eviction --------------------------------------------------------------------

void Ledger::ahead() {
    if (host == nullptr) {
        return;
    }
    note_event(Entry::Kind::ahead, -1);
    const Event event(*this);
    unlock_saved(false);
    while (!planned_ && budget != UNLIMITED && memory > budget / 2 && host->link.idle_out(clock)) {
        Storage* victim = most_worth_copying();
        if (victim == nullptr) {
            break;
        }
        make_host_room(victim->nbytes);
        if (host->lacks(victim->nbytes) > 0) {
            break;
        }
        lock_quietly(*victim);
        host->take(*victim);
        host->saving.put(*victim, host->link.send(victim->nbytes, clock));
        reprice(*victim);
        copy(*victim, true);
    }
    host->link.asked(clock);
    host->turn = clock;
}

void Ledger::follow_plan(bool follow) {
    if (host == nullptr || host->only) {
        return;
    }
    note_event(Entry::Kind::planned, -1, follow ? 1 : 0);
    planned_ = follow;
}

void Ledger::save(Storage& storage) {
    if (host == nullptr || storage.on_host || !storage.resident || storage.nbytes == 0) {
        return;
    }
    note_event(Entry::Kind::save, storage.id);
    const Event event(*this);
    make_host_room(storage.nbytes);
    if (host->lacks(storage.nbytes) > 0) {
        return;
    }
    host->take(storage);
    host->link.send(storage.nbytes, clock);
    reprice(storage);
    classify(storage);  // it may have been excluded before, when the host had no room
    copy(storage, true);
}

// Return the candidate for which a host copy is worth most: the one most expensive to recompute per
// byte. With `only`, return the least recently used one.
Storage* Ledger::most_worth_copying() const noexcept {
    const auto worth = [](const Storage& storage) {
        return static_cast<double>(storage.cost) / static_cast<double>(storage.nbytes);
    };
    Storage* found = nullptr;
    for (Storage* each = first_; each != nullptr; each = each->next) {
        if (each->order < 0 || !host->worth_copying(*each, clock)) {
            continue;
        }
        const bool better = found == nullptr || (host->only ? each->last_access < found->last_access
                                                            : worth(*each) > worth(*found));
        found = better ? each : found;
    }
    return found;
}

// Unlock the storages whose copies to the host are complete. If `all_of_them`, also unlock those
// whose copies are in progress.
void Ledger::unlock_saved(bool all_of_them) {
    std::vector<Storage*> landed;
    for (const auto& [storage, end] : host->saving) {
        if (all_of_them || end <= clock) {
            landed.push_back(storage);
        }
    }
    for (Storage* storage : landed) {
        host->saving.take(*storage);
        unlock_quietly(*storage);
        if (storage->dead()) {
            evict_or_remove(*storage);
        }
    }
}

// Unlock the prefetched storages that the program has used since, so that they can be evicted
// again. If `all_of_them`, unlock all prefetched storages.
void Ledger::unlock_prefetched(bool all_of_them) {
    std::vector<Storage*> used;
    for (const auto& [storage, since] : host->coming) {
        if (all_of_them || storage->last_access > since || storage->dead()) {
            used.push_back(storage);
        }
    }
    for (Storage* storage : used) {
        host->coming.take(*storage);
        unlock_quietly(*storage);
        if (storage->dead()) {
            evict_or_remove(*storage);
        }
    }
}

// -- discarding copies ----------------------------------------------------------------------------

void Ledger::discards() {
    if (host != nullptr && !host->discarded.empty()) {
        note_event(Entry::Kind::discards, -1);
        const Event event(*this);
        discard_all();
    }
}

void Ledger::discard_all() {
    if (host->discarded.empty()) {
        return;
    }
    while (!host->discarded.empty()) {
        const Ref<Storage> storage = std::move(host->discarded.back());
        host->discarded.pop_back();
        discard(*storage);
    }
    for (Storage* storage : std::exchange(host->refused, {})) {
        classify(*storage);
    }
}

// Discard the host copy of `storage`, which may have left the graph.
void Ledger::discard(Storage& storage) {
    host->drop(storage);
    if (storage.listed) {
        renew(storage);
    }
    note(Entry::Kind::discard, storage.id);
    performer_.discard(storage);
}

// Update the cost of restoring `storage`: that of the transfer if it has a host copy or no recipe,
// otherwise that of the calls that made it.
void Ledger::reprice(Storage& storage) {
    const bool copied = storage.on_host || !storage.replayable;
    storage.cost = copied ? host->cost(storage) : recipe_ns(storage);
    if (storage.resident) {
        chooser_->repriced(storage);
    }
}

// Mark `storage` and its values as in memory again.
void Ledger::appear(Storage& storage) {
    storage.resident = true;
    for (Value* value = storage.first_value(); value != nullptr; value = value->next) {
        value->defined = value->call->ran;
    }
}

// -- for the rest of the ledger -------------------------------------------------------------------

// Unlock `storage` if a transfer in progress locks it. Return true if the storage has no other
// lock.
bool Ledger::abandon_copy(Storage& storage) {
    if (host == nullptr) {
        return false;
    }
    for (Moves* moves : {&host->saving, &host->coming}) {
        if (moves->take(storage)) {
            unlock_quietly(storage);
        }
    }
    return storage.locks == 0;
}

// Let the host copy of `storage`, which left the engine's graph, be discarded later.
void Ledger::left(Storage& storage) const {
    if (host != nullptr) [[unlikely]] {
        std::erase(host->refused, &storage);
        if (storage.on_host) {
            host->discarded.emplace_back(&storage);
        }
    }
}

// Update the cost of `storage` in the policy. The cost may have decreased, which policies do not
// expect, so remove the storage from the policy and add it again.
void Ledger::renew(Storage& storage) {
    if (host != nullptr) [[unlikely]] {
        // The cost of a storage on the host is that of its transfer already. Costs that the policy
        // has added up include it, so it stays until the storage is in memory again.
        if (storage.resident || !storage.on_host) {
            reprice(storage);
        }
        if (storage.order >= 0) {
            storage.order = -1;
            chooser_->remove(storage);
        }
    }
    classify(storage);
}

}  // namespace rekindle
