// The half of `Engine` that runs calls, for the first time and again.
#include <algorithm>
#include <cstddef>

#include "engine.h"

namespace rekindle {

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
    raise_peak(workspace_of(call));
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
                storage.cost += storage.on_host ? 0 : call.cost;
                storage.replayable = storage.replayable && call.replayable;
                chooser_->repriced(storage);
            }
        }
    }
    if (call.replayable) {
        graph.consume(call);
    } else if (host != nullptr) {
        const std::uint64_t mark = graph.new_mark();
        for (Value* value : call.outputs()) {
            if (value->storage->mark != mark) {
                value->storage->mark = mark;
                renew(*value->storage);
            }
        }
    }
}

// -- bringing back --------------------------------------------------------------------------------

void Engine::require_quietly(Value& value) {
    touch(*value.storage);
    if (copies(value)) {
        swap_in(*value.storage);
    }
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

    std::size_t first() const noexcept { return base_; }

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
        const bool comes = missing != nullptr && copies(*missing);
        if (missing != nullptr && !comes) {
            open(*missing->call, missing, locks);
            continue;
        }
        const Frame frame = frames_.back();
        try {
            if (comes) {
                swap_in(*missing->storage);
            } else {
                run(frame, held);
            }
        } catch (const NoRoom&) {
            if (locks == Locks::early || host == nullptr || !give_up(progress.first())) {
                throw;
            }
            continue;
        }
        if (comes) {
            continue;
        }
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
    for (const Overwrite& pair : frame.call->overwrites()) {  // NOLINT(readability-use-anyofallof)
        const Storage& storage = *pair.source->storage;
        const auto first = locked_.begin() + static_cast<std::ptrdiff_t>(frame.locked);
        const auto mine = std::count(first, locked_.end(), &storage);
        const bool kept = storage.held || storage.pinned || !storage.dead() || !storage.replayable;
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
    make_room(call.nbytes - lent + workspace_of(call), &call);
    note(Entry::Kind::compute, call.id, 0, in_place ? 1 : 0);
    performer_.compute(call, in_place);
    if (!call.ran) {
        enter(call, held);
        free_all();
        return;
    }
    std::vector<Storage*> copied;  // what comes beside what is wanted, while its copy stays
    for (const Value* value : call.outputs()) {
        Storage& storage = *value->storage;
        const bool wanted = frame.wanted != nullptr && frame.wanted->storage == &storage;
        if (storage.on_host && !storage.resident && is_root(*value) && !wanted) {
            copied.push_back(&storage);
        }
    }
    readmit(frame, in_place);
    drop_unasked(call);
    for (Storage* storage : copied) {
        if (storage->listed) {
            evict(*storage);
        }
    }
}

void Engine::readmit(const Frame& frame, bool in_place) {
    Call& call = *frame.call;
    clock += call.cost;
    recompute_ns += call.cost;
    if (recompute_ns > rules.recompute_limit) {
        throw Thrashed(recompute_ns, rules.recompute_limit);
    }
    memory += call.nbytes;
    if (in_place) {
        for (const Overwrite& pair : call.overwrites()) {
            memory -= take_over(pair);
        }
    }
    raise_peak(workspace_of(call));
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
    if (old.restorable()) {
        chooser_->evicted(old);
    }
    return old.nbytes;
}

}  // namespace rekindle
