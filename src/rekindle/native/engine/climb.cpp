// The part of `Engine` that runs calls of operators, for the first time and to recompute evicted
// values.
//
// NOTE [Recomputation without recursion]
//
// To recompute a value, the engine first recomputes the evicted inputs of its call, then their
// evicted inputs, and so on. Chains are thousands of calls long, so `climb` uses explicit stacks
// instead of recursion. `frames_` holds the calls in progress, `pending_` their missing inputs, and
// `locked_` the inputs that must stay resident.
//
// `Performer::compute` may release the session's mutex. Other threads can then run events (visits)
// that evict, overwrite or free anything that is not locked. `visits_` counts them. If it changed,
// the climb restarts from the value that was asked for, because its stacks may be outdated.
// `MOST_BEGUN` bounds the restarts.
//
// The first attempt locks all resident inputs of a call before it recomputes the missing ones
// (`Locks::early`). If the budget does not suffice, those locks may be the reason. The second
// attempt recomputes in the order of the program (see in_order.cpp). If checkpoints of earlier
// recomputations occupy memory, a third attempt does the same without them. The last attempt
// (`Locks::late`) first evicts everything that it can. It locks each input only when all inputs
// before it are resident.
#include <algorithm>
#include <cstddef>
#include <utility>

#include "engine.h"

namespace rekindle {

namespace {

// Scope in which recomputation does not evict checkpoints.
class Sparing final {
public:
    explicit Sparing(bool& spares) noexcept : spares_(spares) { spares_ = true; }

    Sparing(const Sparing&) = delete;
    Sparing& operator=(const Sparing&) = delete;
    Sparing(Sparing&&) = delete;
    Sparing& operator=(Sparing&&) = delete;

    ~Sparing() { spares_ = false; }

private:
    bool& spares_;
};

// Return true if the topmost call in progress must still run again and all its inputs are in
// memory. Events of other threads may have changed either.
bool can_run(const Frame& frame) {
    const Call& call = *frame.call;
    const bool wanted = frame.wanted == nullptr || is_missing(*frame.wanted);
    return wanted && call.replayable && call.linked &&
           std::ranges::all_of(call.inputs(), [](const Edge& edge) { return edge.value->defined; });
}

// Call `visit` for the outputs of `call`. `wanted` (the output to recompute, else the first) comes
// last, so that it becomes a candidate for eviction last.
template <class F>
void outputs_but_last(Call& call, const Value* wanted, F&& visit) {
    if (call.n_outputs == 0) {
        return;
    }
    Value* last = nullptr;
    const Value* chosen = wanted != nullptr ? wanted : call.outputs()[0];
    for (std::uint32_t i = 0; i < call.n_outputs; ++i) {
        Value* value = call.outputs()[i];
        if (value == chosen) [[likely]] {
            last = value;
        } else {
            visit(*value);
        }
    }
    if (last != nullptr) {
        visit(*last);
    }
}

bool reads(const Call& call, const Storage& storage) {
    return std::ranges::any_of(call.inputs(), [&](const Edge& edge) {
        return edge.value->storage == &storage;
    });
}

}  // namespace

// -- first runs -----------------------------------------------------------------------------------

// After the first run of `call`, add the bytes of its outputs to `memory`, and enter `call` and its
// outputs into the graph.
void Engine::enter(Call& call, bool held) {
    call.ran = true;
    clock += call.cost;
    compute_ns += call.cost;
    count_call();
    for (const Overwrite& pair : call.overwrites()) {
        memory -= take_over(pair);
        call.replayable = call.replayable && pair.source->storage->replayable;
    }
    memory += call.nbytes;
    raise_peak(workspace_of(call));
    link(call);
    for (Value* value : call.outputs()) {
        if (is_root(*value)) {
            value->storage->resident = true;
        }
    }
    outputs_but_last(call, nullptr, [&](Value& value) {
        Storage& storage = *value.storage;
        value.defined = true;
        storage.last_access = clock;
        if (!call.replayable) {
            note_use(storage);
        }
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

// Link `call` into the graph, and update cost and recipe of the storages of its outputs.
void Engine::link(Call& call) {
    graph.link(call);
    for (Value* value : call.outputs()) {
        if (is_root(*value)) {
            enter_graph(*value->storage);
            value->storage->cost = call.cost;
            value->storage->replayable = call.replayable;
        }
    }
    if (call.views()) [[unlikely]] {
        // A view adds to the cost of a storage that existed before this call.
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
    } else if (host != nullptr) [[unlikely]] {
        const std::uint64_t mark = graph.new_mark();
        for (Value* value : call.outputs()) {
            if (value->storage->mark != mark) {
                value->storage->mark = mark;
                renew(*value->storage);
            }
        }
    }
}

// -- interludes: while one call runs, the engine accepts events of other threads ------------------

Engine::Interlude::Interlude(Engine& engine, Call& call, bool in_place)
    : engine_(engine),
      call_(&call),
      frames_(std::exchange(engine.frames_, {})),
      pending_(std::exchange(engine.pending_, {})),
      locked_(std::exchange(engine.locked_, {})),
      taken_(call.nbytes + engine.workspace_of(call)),
      nesting_(std::exchange(engine.nesting_, 0)),
      spares_checkpoints_(std::exchange(engine.spares_checkpoints_, false)),
      lent_(in_place) {
    std::vector<Call*>& running = engine_.running_;
    // While another thread runs the call as well, both are outdated if one is.
    call.outdated = call.outdated && std::ranges::find(running, &call) != running.end();
    running.push_back(&call);
    engine_.in_flight += taken_;
    if (in_place) {
        engine_.lend(call);
    }
}

Engine::Interlude::Interlude(Engine& engine)
    : engine_(engine),
      call_(nullptr),
      frames_(std::exchange(engine.frames_, {})),
      pending_(std::exchange(engine.pending_, {})),
      locked_(std::exchange(engine.locked_, {})),
      taken_(0),
      nesting_(std::exchange(engine.nesting_, 0)),
      spares_checkpoints_(std::exchange(engine.spares_checkpoints_, false)),
      lent_(engine.lent_) {}

Engine::Interlude::~Interlude() {
    if (call_ != nullptr) {
        engine_.running_.erase(std::ranges::find(engine_.running_, call_));
    }
    engine_.in_flight -= taken_;
    engine_.frames_ = std::move(frames_);
    engine_.pending_ = std::move(pending_);
    engine_.locked_ = std::move(locked_);
    engine_.nesting_ = nesting_;
    engine_.spares_checkpoints_ = spares_checkpoints_;
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

// Mark the storages that the running `call` overwrites as evicted. Only `call` may use them now; an
// event of another thread that needs one must recompute it.
void Engine::lend(const Call& call) {
    for (const Overwrite& pair : call.overwrites()) {
        Storage& storage = *pair.source->storage;
        memory -= storage.nbytes;
        vanish(storage);
        chooser_->evicted(storage);
    }
}

// -- recomputation --------------------------------------------------------------------------------

// Put `value` into memory, by swapping it in or recomputing it. Repeat if other threads evict it
// again meanwhile.
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

// Run `call` after recomputing its evicted inputs. See NOTE [Recomputation without recursion] for
// the attempts.
void Engine::materialize(Call& call, Value* wanted, bool held) {
    {
        const Sparing sparing(spares_checkpoints_);
        try {
            climb(call, wanted, held, Locks::early);
            return;
        } catch (const NoRoom&) {  // NOLINT(bugprone-empty-catch): the next attempt may succeed
        }
        if (recomputes_in_order(call, wanted, held)) {
            return;
        }
    }
    if (!checkpoints_.empty()) {
        give_up_checkpoints();
        if (recomputes_in_order(call, wanted, held)) {
            return;
        }
    }
    shrink(-1);
    if (wanted == nullptr || is_missing(*wanted)) {
        climb(call, wanted, held, Locks::late);
    }
}

// The calls in progress of one recomputation. The destructor removes the unfinished ones from the
// engine's stacks, also after an error.
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

    // Remove all calls in progress from the engine's stacks, and unlock their inputs. Free those
    // inputs that nothing needs any more.
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

    // Restart the recomputation, because events of other threads may have changed which values are
    // in memory and how to recompute the others. Return false if `wanted` need not be recomputed
    // any more.
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

    // Make room for the topmost call in progress. Return false if no other call can give up more.
    bool give_up() { return engine_.give_up(base_, gave_up_); }

    void pop() {
        const Frame frame = engine_.frames_.back();
        engine_.frames_.pop_back();
        engine_.close(frame);
    }

    // Remove the topmost call, which has run. Evict or free those of its inputs that nothing needs
    // now. With `Locks::late` dead values stay: to recompute one of them again, while other inputs
    // are locked, could need more memory than there is.
    void retire(Locks locks) {
        const Call& ran = *engine_.frames_.back().call;
        pop();
        for (std::uint32_t i = 0; i < ran.n_inputs; ++i) {
            Storage& input = *ran.edges[i].value->storage;
            if (locks == Locks::early) {
                engine_.evict_or_remove(input);
            } else {
                engine_.prune(input);
                engine_.free_all();
            }
        }
    }

private:
    Engine& engine_;
    std::size_t base_;
    std::size_t begun_ = 1;
    std::vector<OpId> gave_up_;  // calls that gave up their inputs
};

// Recompute the evicted inputs of `call`, depth first and in their order, then run `call`. Uses
// explicit stacks instead of recursion.
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
            if (locks == Locks::early || host == nullptr || !progress.give_up()) {
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
        progress.retire(locks);
    }
}

// Push `call` on the stack of calls in progress, and its evicted inputs on the stack `pending_`.
// `Locks::early`: lock the resident inputs now, so that they are not evicted. `Locks::late`: push
// them on `pending_` as well. Each is then locked once all inputs before it are resident.
void Engine::open(Call& call, Value* wanted, Locks locks) {
    // If more calls are in progress than exist, some call depends on its own output.
    if (frames_.size() > graph.n_calls()) {
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

// Lock the inputs of the topmost call in progress in order, up to the first that is not in memory.
// Return that input; null if there is none.
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

// Unlock the inputs of a call that left the stack of calls in progress. If all of them are locked,
// unlock them in the order of the arguments, because storages become candidates for eviction in the
// order of unlocking.
void Engine::close(const Frame& frame) {
    // If an event of another thread removed the call from the graph, `n_inputs` is 0.
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

// Return true if only the topmost call in progress needs the inputs that it overwrites.
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

// Return the bytes that `call` needs while it runs, in addition to those already counted in
// `memory`.
Bytes Engine::bytes_beside(const Call& call, bool in_place) const {
    Bytes taken_over = 0;
    if (in_place) {
        for (const Overwrite& pair : call.overwrites()) {
            taken_over += pair.source->storage->nbytes;
        }
    }
    return call.nbytes - taken_over + workspace_of(call);
}

// Make room for the topmost call in progress, run it, and update the engine's state with its
// results.
void Engine::run(const Frame& frame, bool held) {
    Call& call = *frame.call;
    const bool overwrites = call.n_overwrites != 0;
    bool in_place = overwrites && (!call.ran || may_consume(frame));
    const std::uint64_t visits = visits_;
    make_room(bytes_beside(call, in_place), &call);
    if (visits != visits_ && call.ran) {
        // Another thread may need an input that the call would overwrite, so run it on a copy.
        if (in_place && !may_consume(frame)) {
            in_place = false;
            make_room(bytes_beside(call, in_place), &call);
        }
        if (!can_run(frame)) {
            return;
        }
    }
    if (call.ran && !call.linked) [[unlikely]] {
        throw Lost();  // the inputs of the call are not known any more
    }
    note(Entry::Kind::compute, call.id, 0, in_place ? 1 : 0);
    lent_ = false;
    performer_.compute(call, in_place);
    const bool lent = std::exchange(lent_, false);
    // Another thread overwrote an input while the call ran. The call may have read wrong contents,
    // so discard its results.
    if (visits != visits_ && is_outdated(call)) {
        clock += call.cost;
        recompute_ns += call.cost;
        return;
    }
    if (!call.ran) {
        enter(call, held);
        free_all();
        return;
    }
    // Other outputs of this call that have a host copy. No event needs them, so they are evicted
    // again below.
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
    if (recompute_limit_ && recompute_ns > *recompute_limit_) {
        throw Thrashed(recompute_ns, *recompute_limit_);
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
        // If this output was in memory already, free its recomputed duplicate at once.
        if (storage.resident) {
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

// Free the outputs of `call` that were recomputed together with the wanted one, although nothing
// can use them any more.
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

// Count the memory of the overwritten input as memory of the output from now on. Return the bytes
// of this memory.
Bytes Engine::take_over(const Overwrite& overwrite) {
    Storage& old = *overwrite.source->storage;
    Storage& made = *overwrite.output->storage;
    // The program may hold the evicted output already, through a placeholder.
    made.held = made.held || old.held;
    old.held = false;
    made.pinned = old.pinned;
    old.pinned = false;
    for (Call* each : running_) {
        each->outdated = each->outdated || reads(*each, old);
    }
    vanish(old);
    if (old.restorable()) {
        chooser_->evicted(old);
    }
    return old.nbytes;
}

}  // namespace rekindle
