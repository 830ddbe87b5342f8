#include "engine.h"

#include <algorithm>
#include <cstddef>

#include "../base/assert.h"

namespace rekindle {

namespace {

// Which of its storage's values it is; the root is 0.
std::int64_t index_of(const Value& value) {
    std::int64_t index = 0;
    for (const Value* at = &value.storage->root; at != &value; at = at->next) {
        ++index;
    }
    return index;
}

}  // namespace

Engine::Engine(
    Bytes most, Performer& performer, const Policy& policy, bool advised, const Rules& how
)
    : Ledger(most, policy, advised, how, performer) {}

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

void Engine::use(Value& value) {
    note_value(Entry::Kind::use, value);
    const Event event(*this);
    if (value.defined) {
        touch(*value.storage);
    } else {
        require_quietly(value);
    }
    hold_by_program(*value.storage);
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
    if (rules.dead == Dead::ignore) {
        return;
    }
    const Event event(*this);
    --storage.references;
    if (storage.dead()) {
        let_go(storage);
    }
}

void Engine::drop(Storage& storage) {
    note_event(Entry::Kind::drop, storage.id);
    const Event event(*this);
    storage.held = false;
    classify(storage);
    if (storage.dead()) {
        let_go(storage);
    }
}

void Engine::gone(Storage& storage) {
    note_event(Entry::Kind::gone, storage.id);
    const Event event(*this);
    storage.held = false;
    if (!storage.resident) {  // it was let go while the program held it
        freed_.push_back(&storage);
        prune(storage);
    } else if (!storage.consumed()) {
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

// Unlocks what was saved, however that ends.
class Engine::Saved final {
public:
    explicit Saved(Engine& engine) : engine_(engine) {}
    Saved(const Saved&) = delete;
    Saved& operator=(const Saved&) = delete;
    Saved(Saved&&) = delete;
    Saved& operator=(Saved&&) = delete;
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

void Engine::save_from(Storage& storage) {
    std::vector<Storage*> needy;
    graph.made_through(storage, needy);
    Saved saved(*this);
    for (Storage* made : needy) {  // these must not make way for the others
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

void Engine::forget_quietly(Storage& storage) {
    save_from(storage);
    std::vector<Storage*> useless{&storage};
    std::vector<Call*> calls;
    while (!useless.empty()) {
        const std::size_t known = bereft_.size();
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
        for (std::size_t i = known; i < bereft_.size(); ++i) {
            if (graph.useless(*bereft_[i])) {
                useless.push_back(bereft_[i].get());
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
    evict(storage);
}

void Engine::account(Nanoseconds cost, Bytes nbytes) {
    note_event(Entry::Kind::account, cost, nbytes);
    clock += cost;
    compute_ns += cost;
    unlisted += nbytes;
    memory += nbytes;
    raise_peak();
}

void Engine::resize(Storage& storage, Bytes nbytes) {
    note_event(Entry::Kind::resize, storage.id, nbytes);
    memory += nbytes - storage.nbytes;
    raise_peak();
    storage.nbytes = nbytes;
}

void Engine::note_value(Entry::Kind kind, const Value& value) noexcept {
    if (journal.is_open()) {
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
        note_event(
            Entry::Kind::overwrites, pair.output->storage->id, pair.source->storage->id
        );
    }
    const std::int64_t replayable = call.replayable ? Entry::REPLAYABLE : 0;
    note_event(kind, call.id, call.cost, replayable | (held ? Entry::HELD : 0));
}

// -- first runs -----------------------------------------------------------------------------------

template <class F>
void Engine::outputs_but_last(Call& call, const Value* wanted, F&& visit) {
    if (call.n_outputs == 0) {
        return;
    }
    Value* last = nullptr;
    const Value* chosen = wanted != nullptr ? wanted : call.outputs()[0];
    for (std::uint32_t i = 0; i < call.n_outputs; ++i) {
        Value* value = call.outputs()[i];
        if (value == chosen) {
            last = value;
        } else {
            visit(*value);
        }
    }
    if (last != nullptr) {
        visit(*last);
    }
}

void Engine::enter(Call& call, bool held) {
    call.ran = true;
    clock += call.cost;
    compute_ns += call.cost;
    for (const Overwrite& pair : call.overwrites()) {
        memory -= take_over(pair);
        call.replayable = call.replayable && pair.source->storage->replayable;
    }
    memory += call.nbytes;
    raise_peak();
    if (!rules.quirks) {
        link(call);
    }
    for (Value* value : call.outputs()) {
        if (is_root(*value)) {
            value->storage->resident = true;
            if (rules.quirks) {
                chooser_->returned(*value->storage);
            }
        }
    }
    outputs_but_last(call, nullptr, [&](Value& value) {
        Storage& storage = *value.storage;
        value.defined = true;
        storage.last_access = clock;
        if (held) {
            storage.held = true;
        } else {
            ++storage.references;
            classify(storage);
        }
    });
    for (std::uint32_t i = 0; i < call.n_overwrites; ++i) {
        prune(*call.overwritten[i].source->storage);
    }
}

void Engine::link(Call& call) {
    graph.link(call);
    for (Value* value : call.outputs()) {
        if (is_root(*value)) {
            enter_graph(*value->storage);
            value->storage->cost = call.cost;
            value->storage->replayable = call.replayable;
        }
    }
    if (call.views()) {  // they are part of what was there before
        const std::uint64_t mark = graph.new_mark();
        for (Value* value : call.outputs()) {
            Storage& storage = *value->storage;
            if (storage.mark != mark && storage.root.call != &call) {
                storage.mark = mark;
                storage.cost += call.cost;
                storage.replayable = storage.replayable && call.replayable;
                chooser_->repriced(storage);
            }
        }
    }
    if (call.replayable) {
        graph.consume(call);
    }
}

// -- bringing back --------------------------------------------------------------------------------

void Engine::require_quietly(Value& value) {
    touch(*value.storage);
    if (!value.defined) {
        materialize(*value.call, &value, false);
    }
}

void Engine::materialize(Call& call, Value* wanted, bool held) {
    if (rules.quirks && !call.ran) {
        link(call);
        for (Value* value : call.outputs()) {
            if (is_root(*value)) {
                chooser_->expected(*value->storage);
            }
        }
    }
    try {
        climb(call, wanted, held, Locks::early);
        return;
    } catch (const NoRoom&) {
        if (rules.quirks) {  // the authors give up here
            throw;
        }
    }
    shrink(-1);  // what is locked may be in the way: once more, empty-handed
    climb(call, wanted, held, Locks::late);
}

// The calls in progress of one climb; closes those that are left, however it ends.
class Engine::Climb final {
public:
    explicit Climb(Engine& engine) : engine_(engine), base_(engine.frames_.size()) {}
    Climb(const Climb&) = delete;
    Climb& operator=(const Climb&) = delete;
    Climb(Climb&&) = delete;
    Climb& operator=(Climb&&) = delete;
    ~Climb() {
        while (!done()) {
            pop();
        }
    }

    bool done() const noexcept { return engine_.frames_.size() == base_; }

    void pop() {
        const Frame frame = engine_.frames_.back();
        engine_.frames_.pop_back();
        engine_.close(frame);
    }

private:
    Engine& engine_;
    std::size_t base_;
};

// Depth first over the inputs, in their order; a stack instead of recursion.
void Engine::climb(Call& call, Value* wanted, bool held, Locks locks) {
    Climb progress(*this);
    open(call, wanted, locks);
    while (!progress.done()) {
        Value* missing = next_missing();
        if (missing != nullptr) {
            open(*missing->call, missing, locks);
            continue;
        }
        const Frame frame = frames_.back();
        run(frame, held);
        progress.pop();
        for (std::uint32_t i = 0; i < frame.call->n_inputs; ++i) {
            prune(*frame.call->edges[i].value->storage);
            free_all();
        }
    }
}

void Engine::open(Call& call, Value* wanted, Locks locks) {
    frames_.push_back({&call, wanted, pending_.size(), locked_.size()});
    const std::span<Edge> inputs = call.inputs();
    for (const Edge& edge : inputs) {
        Storage& storage = *edge.value->storage;
        touch(storage);
        if (locks == Locks::early && edge.value->defined) {
            lock_quietly(storage);
            locked_.push_back(&storage);
        } else {
            pending_.push_back(edge.value);
        }
    }
    const auto first = pending_.begin() + static_cast<std::ptrdiff_t>(frames_.back().pending);
    std::reverse(first, pending_.end());
}

// Locks the inputs that are there, in order, up to the first that is not.
Value* Engine::next_missing() {
    const std::size_t first = frames_.back().pending;
    while (pending_.size() > first) {
        Value* value = pending_.back();
        if (!value->defined) {
            return value;
        }
        pending_.pop_back();
        lock_quietly(*value->storage);
        locked_.push_back(value->storage);
    }
    return nullptr;
}

// Unlocks, in the order of the inputs if all are locked: they become candidates so.
void Engine::close(const Frame& frame) {
    if (pending_.size() == frame.pending) {
        for (const Edge& edge : frame.call->inputs()) {
            unlock_quietly(*edge.value->storage);
        }
    } else {
        for (std::size_t i = frame.locked; i < locked_.size(); ++i) {
            unlock_quietly(*locked_[i]);
        }
    }
    pending_.resize(frame.pending);
    locked_.resize(frame.locked);
}

// Whether nobody but this call can ask for the inputs that it overwrites.
bool Engine::may_consume(const Frame& frame) const {
    for (const Overwrite& pair : frame.call->overwrites()) {
        const Storage& storage = *pair.source->storage;
        const auto first = locked_.begin() + static_cast<std::ptrdiff_t>(frame.locked);
        const auto mine = std::count(first, locked_.end(), &storage);
        const bool kept =
            storage.held || storage.pinned || !storage.dead() || !storage.replayable;
        if (kept || storage.locks > mine || pair.output->storage->resident) {
            return false;
        }
    }
    return true;
}

void Engine::run(const Frame& frame, bool held) {
    Call& call = *frame.call;
    const bool in_place = call.n_overwrites != 0 && (!call.ran || may_consume(frame));
    Bytes lent = 0;
    if (in_place) {
        for (const Overwrite& pair : call.overwrites()) {
            lent += pair.source->storage->nbytes;
        }
    }
    make_room(call.nbytes - lent, &call);
    note(Entry::Kind::compute, call.id, 0, in_place ? 1 : 0);
    performer_.compute(call, in_place);
    if (!call.ran) {
        enter(call, held);
        free_all();
    } else {
        readmit(frame, in_place);
        drop_unasked(call);
    }
}

void Engine::readmit(const Frame& frame, bool in_place) {
    Call& call = *frame.call;
    clock += call.cost;
    recompute_ns += call.cost;
    if (recompute_ns > rules.recompute_limit) {
        throw Thrashed{recompute_ns, rules.recompute_limit};
    }
    memory += call.nbytes;
    if (in_place) {
        for (const Overwrite& pair : call.overwrites()) {
            memory -= take_over(pair);
        }
    }
    raise_peak();
    for (Value* value : call.outputs()) {
        if (!is_root(*value)) {
            continue;
        }
        Storage& storage = *value->storage;
        if (storage.resident) {  // the second copy is given back at once
            memory -= storage.nbytes;
        } else {
            storage.resident = true;
            if (storage.listed) {
                chooser_->returned(storage);
            }
        }
    }
    for (Value* value : call.outputs()) {
        value->defined = value->storage->resident;
    }
    outputs_but_last(call, frame.wanted, [&](Value& value) {
        if (value.storage->listed) {
            classify(*value.storage);
        }
    });
}

// What was brought back with its siblings, and nobody can ask for.
void Engine::drop_unasked(Call& call) {
    for (Value* value : call.outputs()) {
        if (is_root(*value) && !value->storage->listed) {
            value->storage->resident = false;
            memory -= value->storage->nbytes;
            freed_.push_back(value->storage);
        }
    }
    free_all();
}

// The memory of the source now holds the output. Returns its size.
Bytes Engine::take_over(const Overwrite& overwrite) {
    Storage& old = *overwrite.source->storage;
    Storage& made = *overwrite.output->storage;
    made.held = made.held || old.held;  // it may be held already, and let go
    old.held = false;
    made.pinned = old.pinned;
    old.pinned = false;
    vanish(old);
    if (old.replayable) {
        chooser_->evicted(old);
    }
    return old.nbytes;
}

}  // namespace rekindle
