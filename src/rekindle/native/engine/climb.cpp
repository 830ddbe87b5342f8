// The half of `Engine` that runs calls, for the first time and again.
#include <algorithm>
#include <cstddef>
#include <utility>

#include "engine.h"

namespace rekindle {

namespace {

// How often a climb begins anew for each call that there is: far more than any that gets on.
constexpr std::size_t MOST_BEGUN = 100;

}  // namespace

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

// -- interludes -----------------------------------------------------------------------------------

Engine::Interlude::Interlude(Engine& engine, const Call& call, bool in_place)
    : engine_(engine),
      frames_(std::exchange(engine.frames_, {})),
      pending_(std::exchange(engine.pending_, {})),
      locked_(std::exchange(engine.locked_, {})),
      taken_(call.nbytes + engine.workspace_of(call)),
      amid_(std::exchange(engine.amid_, 0)),
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
      amid_(std::exchange(engine.amid_, 0)),
      lent_(engine.lent_) {}

Engine::Interlude::~Interlude() {
    engine_.in_flight -= taken_;
    engine_.frames_ = std::move(frames_);
    engine_.pending_ = std::move(pending_);
    engine_.locked_ = std::move(locked_);
    engine_.amid_ = amid_;
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

// Nobody else can ask for what `call` overwrites. Who needs it meanwhile has to compute it again.
void Engine::lend(const Call& call) {
    for (const Overwrite& pair : call.overwrites()) {
        Storage& storage = *pair.source->storage;
        memory -= storage.nbytes;
        vanish(storage);
        chooser_->evicted(storage);
    }
}

// -- bringing back --------------------------------------------------------------------------------

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

// Whether `value` is not there, and can be computed. Others may have seen to it that neither holds.
bool Engine::is_missing(const Value& value) noexcept {
    return !value.defined && !value.storage->dissolved && value.storage->replayable;
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
    if (wanted == nullptr || is_missing(*wanted)) {
        climb(call, wanted, held, Locks::late);
    }
}

// The calls in progress of one climb; closes those that are left, however it ends.
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

    // Lets go of all inputs, some of which nobody may need any more.
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

    // Begins again: others had the lock, and what is there, and how to make what is not, may be
    // others now. False: nobody needs `wanted` made any more.
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

void Engine::open(Call& call, Value* wanted, Locks locks) {
    if (frames_.size() > graph.n_calls()) {  // the first may not be linked yet
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
    // A call that others took out of the graph meanwhile has no inputs any more.
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

// What `call` takes while it runs, beside what is in memory.
Bytes Engine::bytes_beside(const Call& call, bool in_place) const {
    Bytes taken_over = 0;
    if (in_place) {
        for (const Overwrite& pair : call.overwrites()) {
            taken_over += pair.source->storage->nbytes;
        }
    }
    return call.nbytes - taken_over + workspace_of(call);
}

// Whether the call, which ran before, is still to be run, and its inputs are there. Others may have
// come since they were gathered.
bool Engine::can_run(const Frame& frame) {
    const Call& call = *frame.call;
    const bool wanted = frame.wanted == nullptr || is_missing(*frame.wanted);
    return wanted && call.replayable && call.linked &&
           std::ranges::all_of(call.inputs(), [](const Edge& edge) { return edge.value->defined; });
}

void Engine::run(const Frame& frame, bool held) {
    Call& call = *frame.call;
    const bool overwrites = call.n_overwrites != 0;
    bool in_place = overwrites && (!call.ran || may_consume(frame));
    const std::uint64_t visits = visits_;
    make_room(bytes_beside(call, in_place), &call);
    if (visits != visits_ && call.ran) {
        if (in_place && !may_consume(frame)) {  // others may ask for what it would overwrite
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
    if (visits != visits_ && !(call.replayable && call.linked)) {  // nobody knows what it read
        clock += call.cost;
        recompute_ns += call.cost;
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
    readmit(frame, in_place, lent);
    drop_unasked(call);
    for (Storage* storage : copied) {
        if (storage->listed) {
            evict(*storage);
        }
    }
}

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
