// The part of `Engine` that runs calls, for the first time and again.
//
// NOTE [Recomputation without recursion]
//
// To recompute a value, its evicted inputs are recomputed first, and so on. Chains are thousands of
// calls long, so `climb` uses explicit stacks instead of recursion. `frames_` holds the calls in
// progress, `pending_` their missing inputs, and `locked_` the inputs that must stay resident.
//
// `Performer::compute` may release the session's mutex. Other threads can then run events that
// evict, overwrite or free anything that is not locked. `visits_` counts them. If it changed, the
// climb restarts from the value that was asked for, because its plan may be stale. `MOST_BEGUN`
// bounds the restarts.
//
// The first attempt locks resident inputs early (`Locks::early`). If no room is left, those locks
// may be the reason. The second attempt (`Locks::late`) then evicts everything that it can and
// locks each input only when its turn comes.
#include <algorithm>
#include <cstddef>
#include <utility>

#include "engine.h"

namespace rekindle {

namespace {

// Restarts of a climb per call in the graph. A climb that makes progress never needs as many.
constexpr std::size_t MOST_BEGUN = 100;

}  // namespace

// -- first runs -----------------------------------------------------------------------------------

// Visit the outputs of `call`, with `wanted` (or the first output) last, so that it becomes a
// candidate last.
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

// Add `call` and its outputs to memory and to the graph after the first run.
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

// Link `call` into the graph, and set cost and recipe of the storages that it made.
void Engine::link(Call& call) {
    graph.link(call);
    for (Value* value : call.outputs()) {
        if (is_root(*value)) {
            enter_graph(*value->storage);
            value->storage->cost = call.cost;
            value->storage->replayable = call.replayable;
        }
    }
    if (call.views()) {  // Views are part of a storage that existed before.
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

// -- interludes -----------------------------------------------------------------------------------

Engine::Interlude::Interlude(Engine& engine, const Call& call, bool in_place)
    : engine_(engine),
      frames_(std::exchange(engine.frames_, {})),
      pending_(std::exchange(engine.pending_, {})),
      locked_(std::exchange(engine.locked_, {})),
      taken_(call.nbytes + engine.workspace_of(call)),
      nesting_(std::exchange(engine.nesting_, 0)),
      lent_(in_place) {
    engine_.in_flight += taken_;
    if (in_place) {
        engine_.lend(call);
    }
}

Engine::Interlude::Interlude(Engine& engine)
    : engine_(engine),
      frames_(std::exchange(engine.frames_, {})),
      pending_(std::exchange(engine.pending_, {})),
      locked_(std::exchange(engine.locked_, {})),
      taken_(0),
      nesting_(std::exchange(engine.nesting_, 0)),
      lent_(engine.lent_) {}

Engine::Interlude::~Interlude() {
    engine_.in_flight -= taken_;
    engine_.frames_ = std::move(frames_);
    engine_.pending_ = std::move(pending_);
    engine_.locked_ = std::move(locked_);
    engine_.nesting_ = nesting_;
    engine_.lent_ = lent_;
}

void Engine::Interlude::give_back(const Call& call) {
    lent_ = false;
    for (const Overwrite& pair : call.overwrites()) {
        Storage& storage = *pair.source->storage;
        engine_.memory += storage.nbytes;
        appear(storage);
        engine_.chooser_->returned(storage);
    }
}

// Treat the storages that `call` overwrites as evicted. Only this call needs them; an event that
// does in the meantime must recompute them.
void Engine::lend(const Call& call) {
    for (const Overwrite& pair : call.overwrites()) {
        Storage& storage = *pair.source->storage;
        memory -= storage.nbytes;
        vanish(storage);
        chooser_->evicted(storage);
    }
}

// -- recomputation --------------------------------------------------------------------------------

// Restore `value`, by a transfer or by recomputation. Repeat while visitors evict it again.
void Engine::require_quietly(Value& value) {
    touch(*value.storage);
    const std::uint64_t visits = visits_;
    do {
        if (visits != visits_) {
            if (value.storage->dissolved) {
                return;
            }
            if (!value.storage->restorable()) {
                throw Lost();
            }
        }
        const std::uint64_t now = visits_;
        if (copies(value)) {
            swap_in(*value.storage);
        }
        if (!value.defined && now == visits_) {
            materialize(*value.call, &value, false);
        }
    } while (!value.defined && visits != visits_);
}

// Return true if `value` is not defined and can be recomputed. Other threads may have changed both.
bool Engine::is_missing(const Value& value) noexcept {
    return !value.defined && !value.storage->dissolved && value.storage->replayable;
}

// Run `call`: a climb with early locks, and if there is no room, one with late locks.
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
        if (rules.quirks) {  // The DTR authors' simulator gives up here.
            throw;
        }
    }
    shrink(-1);  // Locked storages may be in the way: evict everything and retry with late locks.
    if (wanted == nullptr || is_missing(*wanted)) {
        climb(call, wanted, held, Locks::late);
    }
}

// The calls in progress of one climb. The destructor closes those that are left, also after an
// error.
class Engine::Climb final {
public:
    explicit Climb(Engine& engine) : engine_(engine), base_(engine.frames_.size()) {}

    Climb(const Climb&) = delete;
    Climb& operator=(const Climb&) = delete;
    Climb(Climb&&) = delete;
    Climb& operator=(Climb&&) = delete;

    ~Climb() { undo(); }

    void undo() {
        while (!done()) {
            pop();
        }
    }

    // Unlock all inputs, and free those that are not needed any more.
    void undo_and_prune() {
        std::vector<Ref<Storage>> had;
        had.reserve(engine_.locked_.size());
        for (Storage* storage : engine_.locked_) {
            had.emplace_back(storage);
        }
        undo();
        for (const Ref<Storage>& storage : had) {
            engine_.prune(*storage);
            engine_.free_all();
        }
    }

    // Restart after visits: other events may have changed which values are resident, and how the
    // others are computed. Return false if `wanted` need not be recomputed any more.
    bool begin_again(Call& call, Value* wanted, Locks locks) {
        undo_and_prune();
        if (wanted == nullptr || !is_missing(*wanted)) {
            return false;
        }
        if (++begun_ > MOST_BEGUN * (engine_.graph.n_calls() + 1)) {
            throw Starved();
        }
        engine_.open(call, wanted, locks);
        return true;
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
    std::size_t begun_ = 1;
};

// Visit the inputs depth first and in their order, with a stack instead of recursion.
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
        const std::uint64_t visits = visits_;
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
        if (visits != visits_) {
            if (!progress.begin_again(call, wanted, locks)) {
                return;
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

// Push a call in progress. Lock its resident inputs (with early locks) and queue the others.
void Engine::open(Call& call, Value* wanted, Locks locks) {
    if (frames_.size() > graph.n_calls()) {  // The first call may not be linked yet.
        throw Cyclic();
    }
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

// Lock the resident inputs in order. Return the first that is missing; null if there is none.
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

// Unlock the inputs of a finished call. If all are locked, use the order of the inputs, because
// they become candidates in that order.
void Engine::close(const Frame& frame) {
    // A call that another event removed from the graph meanwhile has no inputs any more.
    if (pending_.size() == frame.pending && frame.call->n_inputs == locked_.size() - frame.locked) {
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

// Return true if only this call needs the inputs that it overwrites.
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

// Return the bytes that `call` needs in addition to `memory` while it runs.
Bytes Engine::bytes_beside(const Call& call, bool in_place) const {
    Bytes taken_over = 0;
    if (in_place) {
        for (const Overwrite& pair : call.overwrites()) {
            taken_over += pair.source->storage->nbytes;
        }
    }
    return call.nbytes - taken_over + workspace_of(call);
}

// Return true if the call, which ran before, must still run, and its inputs are resident. Visitors
// may have changed either.
bool Engine::can_run(const Frame& frame) {
    const Call& call = *frame.call;
    const bool wanted = frame.wanted == nullptr || is_missing(*frame.wanted);
    return wanted && call.replayable && call.linked &&
           std::ranges::all_of(call.inputs(), [](const Edge& edge) { return edge.value->defined; });
}

// Make room for the call on top, run it, and record its results.
void Engine::run(const Frame& frame, bool held) {
    Call& call = *frame.call;
    const bool overwrites = call.n_overwrites != 0;
    bool in_place = overwrites && (!call.ran || may_consume(frame));
    const std::uint64_t visits = visits_;
    make_room(bytes_beside(call, in_place), &call);
    if (visits != visits_ && call.ran) {
        // Visitors may need the input that it would overwrite.
        if (in_place && !may_consume(frame)) {
            in_place = false;
            make_room(bytes_beside(call, in_place), &call);
        }
        if (!can_run(frame)) {
            return;
        }
    }
    note(Entry::Kind::compute, call.id, 0, in_place ? 1 : 0);
    lent_ = false;
    performer_.compute(call, in_place);
    const bool lent = std::exchange(lent_, false);
    if (!call.ran) {
        enter(call, held);
        free_all();
        return;
    }
    // A visitor overwrote an input, so the contents that the call read are unknown.
    if (visits != visits_ && !(call.replayable && call.linked)) {
        clock += call.cost;
        recompute_ns += call.cost;
        return;
    }
    // Sibling outputs that still have a copy on the host: they need not stay resident.
    std::vector<Storage*> copied;
    for (const Value* value : call.outputs()) {
        Storage& storage = *value->storage;
        const bool wanted = frame.wanted != nullptr && frame.wanted->storage == &storage;
        if (storage.on_host && !storage.resident && is_root(*value) && !wanted) {
            copied.push_back(&storage);
        }
    }
    readmit(frame, in_place, lent);
    drop_unasked(call);
    for (Storage* storage : copied) {
        if (storage->listed) {
            evict(*storage);
        }
    }
}

// Update memory, clock and candidates after a recomputation.
void Engine::readmit(const Frame& frame, bool in_place, bool lent) {
    Call& call = *frame.call;
    clock += call.cost;
    recompute_ns += call.cost;
    if (recompute_ns > rules.recompute_limit) {
        throw Thrashed(recompute_ns, rules.recompute_limit);
    }
    memory += call.nbytes;
    if (in_place && !lent) {
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
        if (storage.resident) {  // It was resident already, so the second copy is freed at once.
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

// Free the outputs that were recomputed as siblings and that left the graph.
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

// Move the memory of the source to the output. Return its size.
Bytes Engine::take_over(const Overwrite& overwrite) {
    Storage& old = *overwrite.source->storage;
    Storage& made = *overwrite.output->storage;
    made.held = made.held || old.held;  // `made` may already be held by the program, and evicted.
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
