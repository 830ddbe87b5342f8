#include "ledger.h"

#include <algorithm>
#include <utility>

#include "../base/assert.h"
#include "advised.h"
#include "null_chooser.h"

namespace rekindle {

Ledger::Ledger(
    Bytes most,
    const Policy& policy,
    bool advised,
    std::optional<Nanoseconds> recompute_limit,
    Performer& performer,
    std::unique_ptr<Chooser> own
)
    : budget(most),
      performer_(performer),
      recompute_limit_(recompute_limit),
      policy_(own != nullptr ? std::move(own) : policy.bind(graph)) {
    bool remembers = policy_->remembers();
    if (advised) {
        auto advice = std::make_unique<AdvisedChooser>(std::move(policy_));
        advice_ = advice.get();
        policy_ = std::move(advice);
        remembers = false;
    }
    chooser_ = policy_.get();
    if (!remembers) {
        null_chooser_ = std::make_unique<NullChooser>();
        chooser_ = null_chooser_.get();
    }
}

Ledger::~Ledger() {
    chooser_ = nullptr;
    advice_ = nullptr;
    policy_.reset();
    idle.clear();
    unrecomputable_.clear();
    host.reset();
    while (first_ != nullptr) {
        Storage& storage = *first_;
        each_maker(storage, [&](Call& call) { graph.dissolve(call); });
        graph.dissolve(storage);
        unlist(storage);
    }
    dispose();
}

// Destroy all storages and calls to which nothing refers. Destroying one can release others.
void Ledger::dispose() noexcept {
    for (;;) {
        if (Storage* storage = graph.dead_storages.take(); storage != nullptr) {
            if (chooser_ != nullptr) {
                chooser_->disposed(*storage);
            }
            graph.clean(*storage);
            performer_.dispose(*storage);
        } else if (Call* call = graph.dead_calls.take(); call != nullptr) {
            graph.clean(*call);
            performer_.dispose(*call);
        } else {
            return;
        }
    }
}

// -- for drivers ----------------------------------------------------------------------------------

bool Ledger::has_room(Bytes nbytes) const noexcept {
    return memory <= budget_beside(nbytes) || nbytes <= free_bytes();
}

void Ledger::make_room(Bytes nbytes, Call* call) {
    note_event(Entry::Kind::make_room, -1, nbytes + in_flight);
    const Event event(*this);
    while (memory > budget_beside(nbytes)) {
        const std::uint64_t visits = visits_;
        shrink(budget_beside(nbytes));
        if (memory <= budget_beside(nbytes) || visits != visits_) {
            // Other threads may have taken or freed memory while the policy's Python code ran, so
            // compare again.
            continue;
        }
        if (!reserve_.empty()) {
            give_up_reserve();
        } else if (!checkpoints_.empty() && !spares_checkpoints_) {
            give_up_checkpoints();
        } else {
            throw NoRoom(nbytes + in_flight, memory, budget, Ref<Call>(call));
        }
    }
}

void Ledger::shrink(Bytes nbytes) {
    note_event(Entry::Kind::shrink, -1, nbytes);
    const Event event(*this);
    if (host != nullptr) {
        send_until(nbytes);
        return;
    }
    while (memory > nbytes) {
        Storage* victim = choose();
        if (victim == nullptr) {
            return;
        }
        evict(*victim);
    }
}

void Ledger::evict_these(std::span<const Ref<Storage>> storages) {
    const Event event(*this);
    for (const Ref<Storage>& storage : storages) {
        if (storage->order < 0) {
            continue;
        }
        note(Entry::Kind::evict, storage->id);
        if (host != nullptr) {
            send(*storage);
        } else {
            evict(*storage);
        }
    }
}

double Ledger::loss(Storage& storage) {
    listen();
    return chooser_->loss(storage, clock);
}

void Ledger::give_up_reserve() {
    give_up(reserve_, &Storage::reserved);
}

void Ledger::keep_checkpoint(std::span<Storage* const> storages) {
    for (Storage* storage : storages) {
        if (storage->resident && storage->listed && !storage->checkpoint) {
            storage->checkpoint = true;
            checkpoints_.push_back(storage);
            classify(*storage);
        }
    }
}

void Ledger::give_up_checkpoints() {
    give_up(checkpoints_, &Storage::checkpoint);
}

// Clear the list `kept` and the flag `mark` of its storages, so that they may be evicted.
void Ledger::give_up(std::vector<Storage*>& kept, bool Storage::* mark) {
    const std::vector<Storage*> storages = std::exchange(kept, {});
    for (Storage* storage : storages) {
        storage->*mark = false;
    }
    for (Storage* storage : storages) {
        classify(*storage);
    }
}

Bytes Ledger::free_bytes() const noexcept {
    Bytes evictable = 0;
    for (const Storage* each = first_; each != nullptr; each = each->next) {
        evictable += is_candidate(*each) ? each->nbytes : 0;
    }
    return budget_beside(0) - memory + evictable;
}

Storage* Ledger::choose() {
    listen();
    Storage* victim = chooser_->choose(clock);
    if (host != nullptr && victim != nullptr && !victim->replayable) [[unlikely]] {
        // The policy chooses a source: take the one that is used last.
        if (const auto distance = host->order.distance(*victim)) {
            Storage* later = furthest(*distance);
            return later == nullptr ? victim : later;
        }
    }
    return victim;
}

void Ledger::listen() {
    if (null_chooser_ == nullptr) {
        return;
    }
    note_event(Entry::Kind::listen, -1);
    null_chooser_.reset();
    chooser_ = policy_.get();
    std::vector<Storage*> candidates;
    for (Storage* storage = first_; storage != nullptr; storage = storage->next) {
        if (storage->order >= 0) {
            candidates.push_back(storage);
        } else if (storage->restorable() && !storage->resident) {
            chooser_->evicted(*storage);
        }
    }
    std::ranges::sort(candidates, {}, &Storage::order);
    for (Storage* candidate : candidates) {
        chooser_->add(*candidate);
    }
}

void Ledger::take_unrecomputable(std::vector<Storage*>& found) {
    for (const Ref<Storage>& storage : unrecomputable_) {
        if (storage->consumed() && storage->resident) {
            found.push_back(storage.get());
        }
    }
    unrecomputable_.clear();
}

void Ledger::set_evictable_while_held(Storage& storage, bool evictable) {
    note_event(Entry::Kind::set_evictable_while_held, storage.id, 0, evictable ? 1 : 0);
    storage.evictable_while_held = evictable;
    classify(storage);
}

void Ledger::set_evictable_last(Storage& storage) {
    note_event(Entry::Kind::set_evictable_while_held, storage.id, 0, 2);
    storage.evictable_while_held = true;
    if (!storage.reserved) {
        storage.reserved = true;
        reserve_.push_back(&storage);
    }
    classify(storage);
}

void Ledger::clear_reserve() noexcept {
    for (Storage* storage : reserve_) {
        storage->reserved = false;
    }
    reserve_.clear();
}

void Ledger::lock(Storage& storage) {
    note_event(Entry::Kind::lock, storage.id);
    touch(storage);
    lock_quietly(storage);
}

void Ledger::unlock(Storage& storage) {
    note_event(Entry::Kind::unlock, storage.id);
    const Event event(*this);
    unlock_quietly(storage);
    if (storage.dead() && storage.locks == 0) {
        evict_or_remove(storage);
    }
}

// -- storages that a plan marks as not needed for now ---------------------------------------------

void Ledger::mark(Storage& storage) {
    note_event(Entry::Kind::mark, storage.id);
    advice_->mark(storage);
}

void Ledger::unmark(Storage& storage) {
    note_event(Entry::Kind::unmark, storage.id);
    advice_->unmark(storage);
}

void Ledger::clear_marks() {
    note_event(Entry::Kind::clear, -1);
    advice_->clear(clock);
}

Bytes Ledger::spare_beside(std::span<const Edge> inputs) {
    return advice_->spare_beside(inputs, graph.new_mark());
}

// -- eviction -------------------------------------------------------------------------------------

void Ledger::evict(Storage& storage) {
    memory -= storage.nbytes;
    vanish(storage);
    chooser_->evicted(storage);
    free(storage);
    prune(storage);
    free_all();
}

void Ledger::free(Storage& storage) {
    note(Entry::Kind::free, storage.id);
    performer_.free(storage);
}

void Ledger::free_all() {
    for (Storage* storage : freed_) {
        free(*storage);
    }
    freed_.clear();
}

// Mark `storage` and its values as evicted.
void Ledger::vanish(Storage& storage) {
    storage.resident = false;
    evicted_wanted_ = evicted_wanted_ || !storage.dead();
    if (storage.checkpoint) {
        storage.checkpoint = false;
        std::erase(checkpoints_, &storage);
    }
    for (Value* value = storage.first_value(); value != nullptr; value = value->next) {
        value->defined = false;
    }
    if (storage.order >= 0) {
        classify(storage);
    }
}

void Ledger::evict_or_remove(Storage& storage, bool may_stay) {
    const bool kept = storage.locks != 0 || storage.pinned || storage.checkpoint;
    const bool evictable = storage.dead() && storage.consumed() && storage.resident && !kept;
    if (evictable && storage.restorable()) {
        if (!may_stay || !graph.feeds_evicted(storage)) {
            evict(storage);
        }
    } else {
        prune(storage);
        free_all();
    }
}

void Ledger::prune(Storage& start) {
    std::vector<Storage*>& unneeded = unneeded_;
    unneeded.push_back(&start);
    while (!unneeded.empty()) {
        Storage& storage = *unneeded.back();
        unneeded.pop_back();
        if (storage.consumed() || !storage.listed) {
            continue;
        }
        if (!storage.dead()) {
            if (storage.held && storage.references == 0) {
                idle.emplace_back(&storage);
            }
            continue;
        }
        if (storage.locks != 0 && !abandon_copy(storage)) {
            continue;
        }
        if (storage.resident) {
            freed_.push_back(&storage);
        }
        leave_graph(storage, unneeded);
    }
}

void Ledger::leave_graph(Storage& storage, std::vector<Storage*>& unneeded) {
    left(storage);
    unlist(storage);
    if (storage.resident) {
        memory -= storage.nbytes;
        vanish(storage);
    } else if (storage.restorable()) {
        chooser_->forgotten(storage);
    }
    each_maker(storage, [&](Call& call) {
        if (call.n_made > 1) [[unlikely]] {
            for (const Value* value : call.outputs()) {
                if (is_root(*value) && value->storage->listed) {
                    return;  // another output of the call is in the graph and may need the call
                }
            }
        }
        for (const Edge& edge : call.inputs()) {
            unneeded.push_back(edge.value->storage);
        }
        graph.dissolve(call);
    });
    graph.dissolve(storage);
}

void Ledger::unlist(Storage& storage) noexcept {
    (storage.previous != nullptr ? storage.previous->next : first_) = storage.next;
    (storage.next != nullptr ? storage.next->previous : last_) = storage.previous;
    storage.previous = storage.next = nullptr;
    storage.listed = false;
    --n_storages_;
    if (storage.reserved) {
        storage.reserved = false;
        std::erase(reserve_, &storage);
    }
    let(storage);
}

void Ledger::enter_graph(Storage& storage) {
    storage.previous = last_;
    (last_ != nullptr ? last_->next : first_) = &storage;
    last_ = &storage;
    storage.listed = true;
    ++n_storages_;
    hold(storage);
}

std::vector<Storage*> Ledger::disown(Call& call) {
    call.replayable = false;
    graph.unconsume(call);
    std::vector<Storage*> found;
    const std::uint64_t mark = graph.new_mark();
    for (const Value* value : call.outputs()) {
        if (!value->storage->dissolved && value->storage->mark != mark) {
            value->storage->mark = mark;
            found.push_back(value->storage);
        }
    }
    return found;
}

void Ledger::lose_recipe(Call& start) {
    std::vector<Call*> lost{&start};
    while (!lost.empty()) {
        Call& call = *lost.back();
        lost.pop_back();
        for (Storage* storage : disown(call)) {
            if (storage->resident || storage->on_host) {
                unrecomputable_.emplace_back(storage);
            } else {
                for (const Edge* edge = storage->first_consumer; edge != nullptr;
                     edge = edge->next) {
                    lost.push_back(edge->call);
                }
                if (storage->replayable) {
                    chooser_->forgotten(*storage);
                }
            }
            storage->replayable = false;
            renew(*storage);
            prune(*storage);
        }
        for (std::uint32_t i = 0; i < call.n_inputs; ++i) {
            prune(*call.edges[i].value->storage);
        }
    }
}

void Ledger::touch(Storage& storage) {
    storage.last_access = clock;
    // A storage that a call reads is usually locked, so it is no candidate for eviction. It can
    // still be a candidate if the call reads an evicted view, or if it is locked later
    // (`Locks::late`).
    if (storage.order >= 0) {
        chooser_->touched(storage);
    }
    if (!storage.replayable) {
        note_use(storage);
    }
}

// -- candidates -----------------------------------------------------------------------------------

void Ledger::lock_quietly(Storage& storage) {
    if (++storage.locks == 1) {
        classify(storage);
    }
}

void Ledger::unlock_quietly(Storage& storage) {
    if (--storage.locks == 0) {
        classify(storage);
    }
}

void Ledger::hold_by_program(Storage& storage) {
    storage.held = true;
    if (storage.order >= 0) {
        classify(storage);
    }
}

bool Ledger::is_candidate(const Storage& storage) const noexcept {
    return storage.resident && (storage.replayable || swappable(storage)) && storage.locks == 0 &&
           !storage.checkpoint &&
           (!storage.held || (storage.evictable_while_held && !storage.reserved)) &&
           !storage.pinned && storage.nbytes > 0;
}

void Ledger::classify(Storage& storage) {
    const bool candidate = is_candidate(storage);
    if (candidate && storage.order < 0) {
        storage.order = ++order_;
        chooser_->add(storage);
    } else if (!candidate && storage.order >= 0) {
        storage.order = -1;
        chooser_->remove(storage);
    }
}

}  // namespace rekindle
