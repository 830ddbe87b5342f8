// The engine's graph of the program: storages, the values in them, and the calls of operators that
// made the values. Twin of rekindle.engine._graph.
//
// A storage lists the calls that read it (`consumers`), and a call lists the values that it reads.
// A linked call and its outputs hold each other by counted references. `Ledger` removes a storage
// and its calls once no event can need them any more. A driver derives its own classes from
// `Storage` and `Call`, keeps the objects in its own slabs, and refers to them by `Ref`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "../base/ref.h"
#include "../base/slab.h"
#include "../base/types.h"

namespace rekindle {

struct Call;
struct Storage;
struct Uses;
struct Neighbor;  // State of a storage in a `Neighborhood`.
class Graph;

// Contents that one call wrote into a storage: the storage's first value, or a view. The object
// lives as long as the storage.
struct Value final {
    Storage* storage = nullptr;
    // Call that made the value. The value counts a reference to it until the storage leaves the
    // graph.
    Call* call = nullptr;
    Value* next = nullptr;  // Next view of the same storage.
    // True while the value is in memory.
    bool defined = false;
};

// One input of a call. Only the first edge to each storage is listed among the storage's consumers.
struct Edge final {
    Value* value;  // Value that is read. The edge counts a reference to its storage.
    Call* call;
    Edge* previous;
    Edge* next;
};

// An output of a call that takes over the memory of an input.
struct Overwrite final {
    Value* output;
    Value* source;  // Value of the input. Counts a reference to its storage.
};

// Data about a storage that belongs to the eviction policies (`Chooser`). Other code does not read
// it.
struct Standing final {
    enum class News : std::uint8_t { none, candidate, removed };

    Neighbor* neighbor = nullptr;
    // Index of the storage's entry in the `Envelope`; negative if it has none.
    std::int32_t slot = -1;
    std::uint32_t news_at = 0;  // position of the storage in `ScoredChooser::news_`
    // Position in `AdvisedChooser::ready_`, from 1; 0 if it is not in that list.
    std::uint32_t ready_at = 0;
    // Equals `AdvisedChooser::age_` if the plan marked the storage as not needed.
    std::uint32_t marked = 0;
    News news = News::none;
};

// A piece of memory, shared by a tensor and its views: the unit of eviction. In the comments below,
// "it" is the storage.
struct Storage : Counted<Storage> {
    Storage(Graph& graph, StorageId storage_id, Bytes size);

    // Number of locks. A locked storage stays resident, because a call in progress or a transfer
    // uses it.
    std::int32_t locks = 0;
    StorageId id;
    Bytes nbytes;
    // Cost (ns) of restoring this storage: of the calls that made it and its views, or of the
    // transfer if it has a copy on the host.
    Nanoseconds cost = 0;
    Nanoseconds last_access = 0;
    // Sequence number among the candidates for eviction; negative if it is not a candidate.
    std::int64_t order = -1;
    // Number of references, such as autograd's, that permit the storage's eviction
    // (`Engine::retain`).
    std::int32_t references = 0;
    bool held = false;  // variables of the program hold the storage
    // The storage may be evicted even while the program holds it, because an access restores it.
    bool evictable_while_held = false;
    // The storage may be evicted while the program holds it, but only if nothing else can be
    // evicted.
    bool reserved = false;
    // Later recomputations start at this storage, so it is evicted only if nothing else can be.
    bool checkpoint = false;
    bool pinned = false;  // the storage must stay in memory while anything refers to it
    bool resident = false;
    // The storage has a copy on the host. It can be swapped in from there instead of recomputed.
    bool on_host = false;
    // The program has freed this storage, which has no recipe, but may fill it with the same
    // contents again (FSDP does). Until then no value that needs it can be recomputed.
    bool absent = false;
    bool replayable = true;  // True if all calls that made it can run again.
    bool listed = false;     // the storage is in the engine's graph
    bool dissolved = false;  // the storage has left the engine's graph, and never returns
    Value root;              // First value of the storage. `Value::next` leads to its views.
    // First edge of the calls that read this storage and can run again, without those that only
    // make a view of it.
    Edge* first_consumer = nullptr;
    Edge* last_consumer = nullptr;
    Storage* previous = nullptr;  // neighbor in the list of all storages in the engine's graph
    Storage* next = nullptr;
    // Number of the last walk over the graph that visited the storage (`Graph::new_mark`).
    std::uint64_t mark = 0;
    // When the program uses this source, which may be moved to the host; null: not known.
    std::shared_ptr<Uses> uses;
    Standing standing;

    // Return the first value, whose `next` leads to the views; null if the storage left the graph.
    Value* first_value() noexcept { return dissolved ? nullptr : &root; }

    bool consumed() const noexcept { return first_consumer != nullptr; }

    // Return true if the storage can be restored after an eviction.
    bool restorable() const noexcept { return replayable || on_host; }

    // Return true if neither the program nor autograd refers to the storage any more. Recipes of
    // other storages may still need it.
    bool dead() const noexcept { return references == 0 && !held; }

protected:
    ~Storage() = default;
};

// One execution of an operator: its inputs and outputs.
struct Call : Counted<Call> {
    Call(Graph& graph, OpId call_id, Nanoseconds call_cost, bool can_run_again);

    std::uint32_t n_inputs = 0;
    OpId id;
    Nanoseconds cost;
    Bytes nbytes = 0;  // Bytes of the new storages that the call made.
    Edge* edges = nullptr;

    union {
        Value* output = nullptr;  // output of the call, if there is at most one
        Value** several;
    };

    Overwrite* overwritten = nullptr;
    std::uint32_t n_outputs = 0;
    // Number of outputs that are the root (first value) of a new storage.
    std::uint32_t n_made = 0;
    std::uint16_t n_overwrites = 0;
    bool replayable;
    bool ran = false;
    bool linked = false;  // the outputs of the call hold it by counted references
    // The call needs workspace. `Performer::workspace` knows the size.
    bool has_workspace = false;
    // Another thread overwrote an input while the call ran last.
    bool outdated = false;

    std::span<Edge> inputs() const noexcept { return {edges, n_inputs}; }

    std::span<Value* const> outputs() const noexcept {
        if (n_outputs == 1) [[likely]] {
            return {&output, 1};
        }
        return {several, n_outputs};
    }

    std::span<const Overwrite> overwrites() const noexcept { return {overwritten, n_overwrites}; }

    bool views() const noexcept { return n_made < n_outputs; }

protected:
    ~Call() = default;
};

// Return true if `value` is the first value of its storage, not a view.
inline bool is_root(const Value& value) noexcept {
    return &value.storage->root == &value;
}

// Links calls into the graph and takes them apart. Owns the memory of their edges, outputs and
// views.
class Graph final {
public:
    Graph() = default;
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    ~Graph() = default;

    // Return true if some storage or call has no reference left and is not destroyed yet.
    bool any_dead() const noexcept { return dead_storages.any() || dead_calls.any(); }

    DeferredDeletes<Storage> dead_storages;
    DeferredDeletes<Call> dead_calls;

    // -- a call, before it is linked ------------------------------------------------------------

    // Set the values that `call` reads, in the order of its arguments. Must be called once per
    // call.
    void reads(Call& call, std::span<Value* const> inputs);
    // Add an output to `call`: the first value of the new `storage`.
    Value& makes(Call& call, Storage& storage);
    // Add an output to `call`: a view of `storage`.
    Value& views(Call& call, Storage& storage);
    // Set which outputs of `call` take over the memory of which inputs. Must be called once per
    // call.
    void overwrites(Call& call, std::span<const Overwrite> pairs);

    // -- called by the ledger only
    // --------------------------------------------------------------------

    // Let the outputs of `call` hold it by counted references.
    void link(Call& call);
    // Add `call` to the consumers of the storages that it reads. A storage of which the call only
    // makes a view is left out.
    void consume(Call& call);
    // Remove `call` from the lists of consumers of the storages that it reads.
    void unconsume(Call& call) noexcept;
    // Release all references of `call` to other objects, because the call is not needed any more.
    void dissolve(Call& call) noexcept;
    // Release the calls that made `storage`, because the storage left the graph.
    void dissolve(Storage& storage) noexcept;
    // Release what the graph keeps for an object that is about to be destroyed.
    void clean(Storage& storage) noexcept;
    void clean(Call& call) noexcept;

    // Add to `found`, oldest first, the storages that are computed from `storage`, directly or
    // through evicted storages. The search does not go beyond storages that are in memory.
    void made_through(Storage& storage, std::vector<Storage*>& found);
    // Add to `found` the referenced storages that can be recomputed from the source `storage`. Add
    // none unless all of them are resident and only the program refers to them.
    void ends(Storage& storage, std::vector<Ref<Storage>>& found);
    // Return true if an evicted value that the program can reach is recomputed from `storage`. The
    // search passes through evicted dead storages. After a thousand children the result is false.
    bool feeds_evicted(Storage& storage);
    // Return true if `storage` is a source (no recipe) without references that only serves to
    // recompute values that the program holds anyway.
    bool useless(Storage& storage);

    // Return the number of a new walk over the graph. A walk sets the `mark` of each storage that
    // it visits to this number.
    std::uint64_t new_mark() noexcept { return ++marks_; }

    // Return the number of linked calls.
    std::size_t n_calls() const noexcept { return n_calls_; }

    // Return the bytes that the graph's bookkeeping of storages and calls takes.
    std::size_t nbytes() const noexcept;

private:
    void add_output(Call& call, Value& value);
    void unlink(Edge& edge) noexcept;

    Slab<Value> view_values_;
    Arrays<Edge> edges_;
    Arrays<Value*> outputs_;
    Arrays<Overwrite> overwrites_;
    std::uint64_t marks_ = 0;
    std::size_t n_calls_ = 0;
    std::vector<Storage*> stack_;  // stack of a walk over the graph; empty between walks
};

// -- walks over the graph -------------------------------------------------------------------------

// Call `visit(call)` for each call that made a value of `storage`.
template <class F>
void each_maker(Storage& storage, F&& visit) {
    const Call* last = nullptr;
    for (Value* value = storage.first_value(); value != nullptr; value = value->next) {
        // The values of one call follow one another, so this visits each call once.
        if (value->call != last) {
            last = value->call;
            visit(*value->call);
        }
    }
}

// Return the total cost (ns) of the calls that made `storage`, also if a copy on the host could
// restore it.
inline Nanoseconds recipe_ns(Storage& storage) {
    Nanoseconds total = 0;
    each_maker(storage, [&](const Call& call) { total += call.cost; });
    return total;
}

// Visit the storages that must be resident to recompute `storage` (its parents); none if it has a
// copy on the host. A storage may be visited more than once.
template <class F>
void each_parent(Storage& storage, F&& visit) {
    if (storage.on_host) {
        return;
    }
    each_maker(storage, [&](Call& call) {
        for (const Edge& edge : call.inputs()) {
            if (edge.value->storage != &storage) {
                visit(*edge.value->storage);
            }
        }
    });
}

// Call `wanted` with the storages whose recomputation needs `storage`, until it returns true.
// Return true if it did. A storage may be visited more than once.
template <class F>
bool any_child(Storage& storage, F&& wanted) {
    for (const Edge* edge = storage.first_consumer; edge != nullptr; edge = edge->next) {
        for (Value* value : edge->call->outputs()) {
            Storage& child = *value->storage;
            if (&child != &storage && !child.dissolved && !child.on_host && wanted(child)) {
                return true;
            }
        }
    }
    return false;
}

// Visit the storages whose recomputation needs `storage`. A storage may be visited more than once.
template <class F>
void each_child(Storage& storage, F&& visit) {
    any_child(storage, [&](Storage& child) {
        visit(child);
        return false;
    });
}

}  // namespace rekindle
