#include "engine.h"

#include <cstddef>
#include <utility>

#include "../base/assert.h"

namespace rekindle {

namespace {

// Return the position of `value` in its storage's list of values; 0 is the first value.
std::int64_t index_of(const Value& value) {
    std::int64_t index = 0;
    for (const Value* at = &value.storage->root; at != &value; at = at->next) {
        ++index;
    }
    return index;
}

}  // namespace

Engine::Engine(
    Bytes most,
    Performer& performer,
    const Policy& policy,
    bool advised,
    std::optional<Nanoseconds> recompute_limit,
    std::unique_ptr<Chooser> own
)
    : Ledger(most, policy, advised, recompute_limit, performer, std::move(own)) {}

// -- events ---------------------------------------------------------------------------------------

void Engine::call(Call& call, bool held) {
    note_call(Entry::Kind::call, call, held);
    const Event event(*this);
    const Ref<Call> alive(&call);
    for (const Overwrite& pair : call.overwrites()) {
        if (!pair.source->storage->replayable) {
            forget_quietly(*pair.source->storage);
        }
    }
    materialize(call, nullptr, held);
}

void Engine::admit(Call& call, bool held) {
    note_call(Entry::Kind::admit, call, held);
    const Event event(*this);
    enter(call, held);
    free_all();
}

void Engine::defer(Call& call) {
    note_call(Entry::Kind::defer, call, true);
    const Event event(*this);
    call.ran = true;
    link(call);
    for (const Value* value : call.outputs()) {
        Storage& storage = *value->storage;
        storage.last_access = clock;
        storage.held = true;
        evicted_wanted_ = true;
        chooser_->evicted(storage);
    }
}

void Engine::hold(Storage& storage) {
    note_event(Entry::Kind::hold, storage.id);
    hold_by_program(storage);
}

void Engine::use(Value& value) {
    note_value(Entry::Kind::use, value);
    const Event event(*this);
    if (value.defined) {
        touch(*value.storage);
    } else {
        require_quietly(value);
    }
    if (value.defined) {
        hold_by_program(*value.storage);
    }  // A value that left the graph stays undefined, because no later event can need it.
}

void Engine::pin(Value& value) {
    note_value(Entry::Kind::pin, value);
    const Event event(*this);
    require_quietly(value);
    value.storage->pinned = true;
    classify(*value.storage);
}

void Engine::require(Value& value) {
    note_value(Entry::Kind::require, value);
    const Event event(*this);
    require_quietly(value);
}

void Engine::retain(Storage& storage) {
    note_event(Entry::Kind::retain, storage.id);
    ++storage.references;
}

void Engine::release(Storage& storage) {
    note_event(Entry::Kind::release, storage.id);
    const Event event(*this);
    --storage.references;
    if (storage.dead()) {
        evict_or_remove(storage);
    }
}

void Engine::drop(Storage& storage) {
    note_event(Entry::Kind::drop, storage.id);
    const Event event(*this);
    storage.held = false;
    classify(storage);
    if (storage.dead()) {
        // only a variable had kept its memory
        evict_or_remove(storage, false);
    }
}

void Engine::gone(Storage& storage) {
    note_event(Entry::Kind::gone, storage.id);
    const Event event(*this);
    storage.held = false;
    // The engine may have evicted `storage` already.
    if (!storage.resident || !storage.consumed()) {
        prune(storage);
    } else {
        memory -= storage.nbytes;
        vanish(storage);
        chooser_->evicted(storage);
        freed_.push_back(&storage);
    }
    free_all();
}

void Engine::forget(Storage& storage) {
    note_event(Entry::Kind::forget, storage.id);
    const Event event(*this);
    forget_quietly(storage);
}

// Scope in which storages are locked, so that they stay in memory. The destructor unlocks them,
// also after an error.
class Engine::Saved final {
public:
    explicit Saved(Engine& engine) : engine_(engine) {}

    Saved(const Saved&) = delete;
    Saved& operator=(const Saved&) = delete;

    ~Saved() {
        for (Storage* storage : storages_) {
            engine_.unlock_quietly(*storage);
        }
    }

    void save(Storage& storage) {
        storages_.push_back(&storage);
        engine_.lock_quietly(storage);
    }

private:
    Engine& engine_;
    std::vector<Storage*> storages_;
};

// Restore the referenced values that can be computed only from `storage`, and lock them in memory.
void Engine::save_from(Storage& storage, Saved& saved) {
    std::vector<Storage*> needy;
    graph.made_through(storage, needy);
    // First lock the values that are in memory: restoring one of the others could evict them.
    for (Storage* made : needy) {
        if (made->resident) {
            saved.save(*made);
        }
    }
    for (Storage* made : needy) {
        if (!made->dead()) {
            for (Value* value = made->first_value(); value != nullptr; value = value->next) {
                require_quietly(*value);
            }
            saved.save(*made);
        }
    }
}

// Restore all values that depend on `storage`, then remove the recipes of the calls that read
// `storage`. Sources (values without a recipe) that only those recipes needed are processed in the
// same way.
void Engine::forget_quietly(Storage& storage) {
    if (evicted_wanted_) {
        Saved saved(*this);
        std::uint64_t visits = 0;
        // Repeat, because events of other threads may have computed more values from `storage`
        // meanwhile.
        do {
            visits = visits_;
            save_from(storage, saved);
        } while (visits != visits_);
    }
    std::vector<Storage*> useless{&storage};
    std::vector<Call*> calls;
    while (!useless.empty()) {
        const std::size_t known = unrecomputable_.size();
        calls.clear();
        const Edge* edge = useless.back()->first_consumer;
        useless.pop_back();
        for (; edge != nullptr; edge = edge->next) {
            calls.push_back(edge->call);
        }
        for (Call* call : calls) {
            lose_recipe(*call);
            free_all();
        }
        for (std::size_t i = known; i < unrecomputable_.size(); ++i) {
            if (graph.useless(*unrecomputable_[i])) {
                useless.push_back(unrecomputable_[i].get());
            }
        }
    }
}

void Engine::seal(Storage& storage) {
    note_event(Entry::Kind::seal, storage.id);
    const Event event(*this);
    std::vector<Call*> makers;
    each_maker(storage, [&](Call& call) { makers.push_back(&call); });
    for (Call* call : makers) {
        lose_recipe(*call);
        free_all();
    }
}

void Engine::spoil(Storage& storage) {
    note_event(Entry::Kind::spoil, storage.id);
    const Event event(*this);
    if (lent_) {
        if (!storage.resident) {  // if `storage` is in memory, another thread has recomputed it
            free(storage);
        }
        prune(storage);
        free_all();
    } else {
        evict(storage);
    }
}

void Engine::account(Nanoseconds cost, Bytes nbytes, Bytes workspace) {
    note_event(Entry::Kind::account, cost, nbytes, workspace);
    clock += cost;
    compute_ns += cost;
    if (cost != 0) {
        count_call();
    }
    unlisted += nbytes;
    memory += nbytes;
    raise_peak(workspace);
}

void Engine::resize(Storage& storage, Bytes nbytes) {
    note_event(Entry::Kind::resize, storage.id, nbytes);
    memory += nbytes - storage.nbytes;
    raise_peak();
    storage.nbytes = nbytes;
}

void Engine::note_value(Entry::Kind kind, const Value& value) noexcept {
    if (journal.is_open()) [[unlikely]] {
        note_event(kind, value.storage->id, index_of(value));
    }
}

void Engine::note_call(Entry::Kind kind, const Call& call, bool held) noexcept {
    if (!journal.is_open()) {
        return;
    }
    for (const Edge& edge : call.inputs()) {
        note_event(Entry::Kind::reads, edge.value->storage->id, index_of(*edge.value));
    }
    for (const Value* value : call.outputs()) {
        if (is_root(*value)) {
            note_event(Entry::Kind::makes, value->storage->id, value->storage->nbytes);
        } else {
            note_event(Entry::Kind::views, value->storage->id, index_of(*value));
        }
    }
    for (const Overwrite& pair : call.overwrites()) {
        note_event(Entry::Kind::overwrites, pair.output->storage->id, pair.source->storage->id);
    }
    if (call.has_workspace) {
        note_event(Entry::Kind::takes, call.id, workspace_of(call));
    }
    const std::int64_t replayable = call.replayable ? Entry::REPLAYABLE : 0;
    note_event(kind, call.id, call.cost, replayable | (held ? Entry::HELD : 0));
}

}  // namespace rekindle
