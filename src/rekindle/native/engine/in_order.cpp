// The part of `Engine` that recomputes values in the order in which the program first ran the
// calls.
//
// NOTE [Recomputation in order]
//
// Recomputation depth first (climb.cpp) can lock more than the program had in memory: each call in
// progress locks some of its inputs while it waits for the others. `recompute_in_order` first
// collects all calls that it needs. It then runs them in the order of their ids, which is the order
// in which the program ran them. A recomputed value stays locked until all waiting calls that read
// it have run. So these calls need about as much memory as at their first run.
//
// If the results of all calls do not fit into memory, some of them stay as checkpoints (see
// checkpoints.h), so that later recomputations need not begin at the same place again.
#include <algorithm>
#include <queue>
#include <utility>

#include "../base/address_map.h"
#include "checkpoints.h"
#include "engine.h"

namespace rekindle {

namespace {

// Scope in which the engine's stack of locked storages also contains the storages that one waiting
// call has locked.
class Lent final {
public:
    Lent(std::vector<Storage*>& stack, const std::vector<Storage*>& locked)
        : stack_(stack), base_(stack.size()) {
        stack.insert(stack.end(), locked.begin(), locked.end());
    }

    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;

    ~Lent() { stack_.resize(base_); }

private:
    std::vector<Storage*>& stack_;
    std::size_t base_;
};

}  // namespace

// The calls that wait for their inputs to be recomputed. The destructor unlocks their inputs.
class Engine::Waiting final {
public:
    struct Reader final {
        Value* wanted = nullptr;  // as in `Frame`
        // Inputs that are not locked yet, the last one first.
        std::vector<Value*> pending;
        std::vector<Storage*> locked;
    };

    explicit Waiting(Engine& engine) : engine_(engine) {}

    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

    ~Waiting() { undo(); }

    // Unlock the inputs of all waiting calls, and free those inputs that nothing needs any more.
    void undo_and_prune() {
        std::vector<Ref<Storage>> had;
        for (const Call* call : in_order()) {
            for (Storage* storage : reader(*call).locked) {
                had.emplace_back(storage);
            }
        }
        undo();
        for (const Ref<Storage>& storage : had) {
            engine_.prune(*storage);
            engine_.free_all();
        }
    }

    bool empty() const noexcept { return queue_.empty(); }

    bool contains(const Call& call) { return readers_.find(&call) != nullptr; }

    // Return the waiting call that the program ran first.
    Call& first() const { return *queue_.top(); }

    // Return the state of a waiting call. The reference is valid until the next `push` or `pop`.
    Reader& reader(const Call& call) { return readers_.at(&call); }

    // Lock the inputs of the first call in order, up to the first that is not in memory. Return
    // that input; null if there is none.
    Value* next_missing() {
        Reader& waits = reader(first());
        while (!waits.pending.empty()) {
            Value* value = waits.pending.back();
            if (!value->defined) {
                return value;
            }
            waits.pending.pop_back();
            engine_.lock_quietly(*value->storage);
            waits.locked.push_back(value->storage);
        }
        return nullptr;
    }

    void push(Call& call, Value* wanted) {
        readers_.put(&call, Reader{wanted, {}, {}});
        queue_.push(&call);
    }

    // Remove the first call. Its inputs stay locked.
    void pop() {
        readers_.take(queue_.top());
        queue_.pop();
    }

    // Record that the waiting `call` reads the missing `value`.
    void misses(const Value& value, Call& call) { readers_of_.at(&value).push_back(&call); }

    // Lock the outputs of `call`, which has just run, for the waiting calls that read them.
    void lock_outputs(const Call& call) {
        for (Value* value : call.outputs()) {
            if (const std::vector<Call*>* calls = readers_of_.find(value)) {
                for (const Call* reads : *calls) {
                    lock_for(*reads, *value);
                }
                readers_of_.take(value);
            }
        }
    }

    // Return the waiting calls in the order in which they first ran.
    std::vector<Call*> in_order() const {
        std::vector<Call*> calls;
        calls.reserve(queue_.size());
        for (auto rest = queue_; !rest.empty(); rest.pop()) {
            calls.push_back(rest.top());
        }
        return calls;
    }

private:
    struct RanLater final {
        bool operator()(const Call* left, const Call* right) const noexcept {
            return left->id > right->id;
        }
    };

    // Lock `value` for the call `reads`, if that call waits for it.
    void lock_for(const Call& reads, Value& value) {
        Reader* waits = readers_.find(&reads);
        if (waits == nullptr || !value.defined) {
            return;
        }
        const auto place = std::ranges::find(waits->pending, &value);
        if (place != waits->pending.end()) {
            waits->pending.erase(place);
            engine_.lock_quietly(*value.storage);
            waits->locked.push_back(value.storage);
        }
    }

    void undo() {
        for (const Call* call : in_order()) {
            for (Storage* storage : reader(*call).locked) {
                engine_.unlock_quietly(*storage);
            }
        }
        readers_ = {};
        readers_of_ = {};
        queue_ = {};
    }

    Engine& engine_;
    AddressMap<Reader> readers_;                 // by call
    AddressMap<std::vector<Call*>> readers_of_;  // by missing value
    std::priority_queue<Call*, std::vector<Call*>, RanLater> queue_;
};

// Run `call`, to recompute `wanted` or for the first time, as NOTE [Recomputation in order]
// describes. Return false if there is no room.
bool Engine::recomputes_in_order(Call& call, Value* wanted, bool held) {
    if (wanted != nullptr && !is_missing(*wanted)) {
        return true;  // an event of another thread has recomputed it
    }
    try {
        recompute_in_order(call, wanted, held);
        return true;
    } catch (const NoRoom&) {
        return false;
    }
}

// Run `call` and the calls it depends on, in the order in which the program first ran them. See
// NOTE [Recomputation in order].
void Engine::recompute_in_order(Call& call, Value* wanted, bool held) {
    for (std::size_t begun = 1; begun <= MOST_BEGUN * (graph.n_calls() + 1); ++begun) {
        Waiting waiting(*this);
        if (run_waiting(waiting, call, wanted, held)) {
            return;
        }
        // Events of other threads may have changed which values are in memory.
        waiting.undo_and_prune();
        if (wanted == nullptr || !is_missing(*wanted)) {
            return;
        }
    }
    throw Starved();
}

// Run all calls that `call` needs, then `call`. Return false, before all have run, if events of
// other threads ran meanwhile.
bool Engine::run_waiting(Waiting& waiting, Call& call, Value* wanted, bool held) {
    enqueue(waiting, call, wanted);
    const std::vector<Call*> calls = waiting.in_order();
    const std::vector<Checkpoint> checkpoints = checkpoints_for(calls);
    auto checkpoint = checkpoints.begin();
    const std::uint64_t visits = visits_;
    while (!waiting.empty()) {
        if (Value* missing = waiting.next_missing()) {
            restore_missing(waiting, *missing);
            if (visits != visits_) {
                return false;
            }
            continue;
        }
        const Call& next = waiting.first();
        if (!run_first(waiting, held)) {
            return false;
        }
        if (checkpoint != checkpoints.end() && calls[checkpoint->after] == &next) {
            keep_checkpoint(checkpoint->storages);
            ++checkpoint;
        }
        unlock_and_prune(next);
    }
    return true;
}

// Return the checkpoints for a recomputation of `calls`, which run in this order.
std::vector<Checkpoint> Engine::checkpoints_for(std::span<Call* const> calls) {
    AddressMap<bool> evictable;
    for (const Call* call : calls) {
        for (const Edge& edge : call->inputs()) {
            if (is_candidate(*edge.value->storage)) {
                evictable.put(edge.value->storage, true);
            }
        }
    }
    return choose_checkpoints(calls, free_bytes(), evictable);
}

// Swap in `missing`, an input of the first waiting call, or add the call that makes it to the
// waiting calls. The input was in memory when this recomputation began, or it has a copy on the
// host.
void Engine::restore_missing(Waiting& waiting, Value& missing) {
    if (copies(missing)) {
        swap_in(*missing.storage);
    } else if (waiting.contains(*missing.call)) {
        throw Cyclic();
    } else {
        enqueue(waiting, *missing.call, &missing);
    }
}

// Run the first waiting call, all of whose inputs are locked. Return false if events of other
// threads ran meanwhile.
bool Engine::run_first(Waiting& waiting, bool held) {
    Call& call = waiting.first();
    const Waiting::Reader& reader = waiting.reader(call);
    const Frame frame{&call, reader.wanted, pending_.size(), locked_.size()};
    const std::uint64_t visits = visits_;
    {
        const Lent lent(locked_, reader.locked);
        run(frame, held);
    }
    if (visits != visits_) {
        return false;
    }
    waiting.pop();
    waiting.lock_outputs(call);
    return true;
}

// Unlock the inputs of `call`, which has run, and free those that nothing needs any more.
void Engine::unlock_and_prune(const Call& call) {
    for (const Edge& edge : call.inputs()) {
        unlock_quietly(*edge.value->storage);
    }
    for (std::uint32_t i = 0; i < call.n_inputs; ++i) {
        prune(*call.edges[i].value->storage);
        free_all();
    }
}

// Add `call`, and the calls that recompute its missing inputs, to the waiting calls.
void Engine::enqueue(Waiting& waiting, Call& call, Value* wanted) {
    std::vector<std::pair<Call*, Value*>> rest{{&call, wanted}};
    while (!rest.empty()) {
        const auto [next, output] = rest.back();
        rest.pop_back();
        if (waiting.contains(*next)) {
            continue;
        }
        waiting.push(*next, output);
        std::vector<Value*>& pending = waiting.reader(*next).pending;
        const std::span<Edge> inputs = next->inputs();
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            Value* value = inputs[i].value;
            touch(*value->storage);
            pending.push_back(value);
            const auto before = inputs.first(i);
            const bool twice = std::ranges::any_of(before, [value](const Edge& edge) {
                return edge.value == value;
            });
            if (!value->defined && !twice) {
                waiting.misses(*value, *next);
                if (!copies(*value)) {
                    rest.emplace_back(value->call, value);
                }
            }
        }
        std::ranges::reverse(pending);
    }
}

}  // namespace rekindle
