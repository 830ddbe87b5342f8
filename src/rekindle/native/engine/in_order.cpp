// The part of `Engine` that recomputes values in the order in which the program first ran the calls.
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
#include <functional>
#include <queue>
#include <unordered_map>
#include <utility>

#include "checkpoints.h"
#include "engine.h"

namespace rekindle {

// The calls that wait for their inputs to be recomputed. The destructor unlocks their inputs.
class Engine::Waiting final {
public:
    struct Reader final {
        Value* wanted;  // as in `Frame`
        // Inputs that are not locked yet, the last one first.
        std::vector<Value*> pending;
        std::vector<Storage*> locked;
    };

    explicit Waiting(Engine& engine) : engine_(engine) {}

    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    Waiting(Waiting&&) = delete;
    Waiting& operator=(Waiting&&) = delete;

    ~Waiting() { undo(); }

    // Unlock the inputs of all waiting calls, and free those inputs that nothing needs any more.
    void undo_and_prune() {
        std::vector<Ref<Storage>> had;
        for (const Call* call : in_order()) {
            for (Storage* storage : readers_.at(call).locked) {
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

    bool contains(const Call& call) const { return readers_.contains(&call); }

    // Return the waiting call that ran first.
    Call& first() const { return *queue_.top(); }

    Reader& reader(const Call& call) { return readers_.at(&call); }

    void push(Call& call, Value* wanted) {
        readers_.emplace(&call, Reader{wanted, {}, {}});
        queue_.push(&call);
    }

    // Remove the first call. Its inputs stay locked.
    Reader pop() {
        Reader reader = std::move(readers_.at(queue_.top()));
        readers_.erase(queue_.top());
        queue_.pop();
        return reader;
    }

    // Record that the waiting `call` reads the missing `value`.
    void misses(const Value& value, Call& call) { readers_of_[&value].push_back(&call); }

    // Lock the outputs of `call`, which has just run, for the waiting calls that read them.
    void lock_outputs(const Call& call) {
        for (Value* value : call.outputs()) {
            const auto found = readers_of_.find(value);
            if (found == readers_of_.end()) {
                continue;
            }
            for (const Call* reads : found->second) {
                const auto at = readers_.find(reads);
                if (at == readers_.end() || !value->defined) {
                    continue;
                }
                std::vector<Value*>& pending = at->second.pending;
                const auto place = std::ranges::find(pending, value);
                if (place != pending.end()) {
                    pending.erase(place);
                    engine_.lock_quietly(*value->storage);
                    at->second.locked.push_back(value->storage);
                }
            }
            readers_of_.erase(found);
        }
    }

    // Return the waiting calls in the order in which they first ran.
    std::vector<Call*> in_order() const {
        std::vector<Call*> calls;
        calls.reserve(readers_.size());
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

    void undo() {
        for (const Call* call : in_order()) {
            for (Storage* storage : readers_.at(call).locked) {
                engine_.unlock_quietly(*storage);
            }
        }
        readers_.clear();
        readers_of_.clear();
        queue_ = {};
    }

    Engine& engine_;
    std::unordered_map<const Call*, Reader> readers_;
    std::unordered_map<const Value*, std::vector<Call*>> readers_of_;
    std::priority_queue<Call*, std::vector<Call*>, RanLater> queue_;
};

// Recompute in order. Return false if there is no room.
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

// Run all calls that `call` needs, then `call`. Return false if events of other threads ran
// meanwhile, and there is more to run.
bool Engine::run_waiting(Waiting& waiting, Call& call, Value* wanted, bool held) {
    enqueue(waiting, call, wanted);
    const std::vector<Call*> calls = waiting.in_order();
    const std::vector<Checkpoint> checkpoints =
        choose_checkpoints(calls, free_bytes(), [this](const Storage& storage) {
            return is_candidate(storage);
        });
    auto checkpoint = checkpoints.begin();
    const std::uint64_t visits = visits_;
    while (!waiting.empty()) {
        Call& next = waiting.first();
        Waiting::Reader& reader = waiting.reader(next);
        Value* missing = nullptr;
        while (missing == nullptr && !reader.pending.empty()) {
            Value* value = reader.pending.back();
            if (value->defined) {
                reader.pending.pop_back();
                lock_quietly(*value->storage);
                reader.locked.push_back(value->storage);
            } else {
                missing = value;
            }
        }
        if (missing != nullptr) {
            if (copies(*missing)) {
                swap_in(*missing->storage);
            } else if (waiting.contains(*missing->call)) {
                throw Cyclic();
            } else {
                // It was in memory when this recomputation began, and has been evicted since.
                enqueue(waiting, *missing->call, missing);
            }
            if (visits != visits_) {
                return false;
            }
            continue;
        }
        Frame frame{&next, reader.wanted, pending_.size(), locked_.size()};
        locked_.insert(locked_.end(), reader.locked.begin(), reader.locked.end());
        try {
            run(frame, held);
        } catch (...) {
            locked_.resize(frame.locked);
            throw;
        }
        if (visits != visits_) {
            locked_.resize(frame.locked);
            return false;
        }
        waiting.pop();
        waiting.lock_outputs(next);
        for (; checkpoint != checkpoints.end() && calls[checkpoint->after]->id <= next.id;
             ++checkpoint) {
            keep_checkpoint(checkpoint->storages);
        }
        close(frame);
        for (std::uint32_t i = 0; i < next.n_inputs; ++i) {
            prune(*next.edges[i].value->storage);
            free_all();
        }
    }
    return true;
}

// Add `call` to the waiting calls, and those that recompute its missing inputs.
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
