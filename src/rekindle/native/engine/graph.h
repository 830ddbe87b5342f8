// The engine's picture of the program: storages, values in them, and the calls that made them.
// Twin of rekindle.engine._graph.
//
// A storage knows the calls that read it (`consumers`), a call the values it reads: once a call is
// linked the graph holds itself together by counted references in both directions, and `Ledger`
// takes it apart when nobody can ask for a storage any more. Drivers derive once from `Storage` and
// from `Call`, keep those in slabs of their own, and refer to them by `Ref`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../base/ref.h"
#include "../base/slab.h"
#include "../base/types.h"

namespace rekindle {

struct Call;
struct Storage;
struct Neighbor;  // what a neighborhood knows of a storage
class Graph;

// What one call wrote into a storage. Lives as long as that does.
struct Value final {
    Storage* storage = nullptr;
    Call* call = nullptr;   // counted until the storage leaves the graph
    Value* next = nullptr;  // in the storage: the view that was made next
    bool defined = false;
};

// One input of a call. The first of those in the same storage may be listed among its consumers.
struct Edge final {
    Value* value;  // its storage is counted
    Call* call;
    Edge* previous;
    Edge* next;
};

struct Overwrite final {
    Value* output;
    Value* source;  // the input whose memory it takes over; its storage is counted
};

// What choosers note about a storage; nobody else looks at it.
struct Standing final {
    enum class News : std::uint8_t { none, candidate, removed };

    Neighbor* neighbor = nullptr;
    std::int32_t slot = -1;      // of its line; negative: none
    std::uint32_t news_at = 0;   // where it is among the news
    std::uint32_t ready_at = 0;  // where it is among what is advised and ready, from 1
    std::uint32_t marked = 0;    // the age of the advice that has done with it
    News news = News::none;
};

// A piece of memory: the unit of eviction.
struct Storage : Counted<Storage> {
    Storage(Graph& graph, StorageId storage_id, Bytes size);

    std::int32_t locks = 0;  // calls in progress that read it
    StorageId id;
    Bytes nbytes;
    Nanoseconds cost = 0;  // of all calls that made it, views included, or of a copy
    Nanoseconds last_access = 0;
    std::int64_t order = -1;      // when it became a candidate; negative: it is none
    std::int32_t references = 0;  // references that permit eviction
    bool held = false;            // the program's own variables keep the memory
    bool returns = false;         // let go though they do: brought back when the program asks
    bool reserved = false;        // not even then, unless nothing else is left to let go
    bool pinned = false;          // must stay as long as anybody needs it
    bool resident = false;
    bool on_host = false;            // a copy is there, from which it can be had without its calls
    bool replayable = true;          // every call that made it can be run again
    bool listed = false;             // in the graph
    bool dissolved = false;          // it was, and never will be again
    Value root;                      // its first value; views of it are linked to it
    Edge* first_consumer = nullptr;  // replayable calls that read it, but those that only view it
    Edge* last_consumer = nullptr;
    Storage* previous = nullptr;  // in the graph
    Storage* next = nullptr;
    std::uint64_t mark = 0;  // of the walk that saw it last
    Standing standing;

    // Root first, then views; none once it is out of the graph.
    Value* first_value() noexcept { return dissolved ? nullptr : &root; }

    bool consumed() const noexcept { return first_consumer != nullptr; }

    // It can be had again once it is let go.
    bool restorable() const noexcept { return replayable || on_host; }

    // Nobody can ask for it any more; it may still be needed to recompute others.
    bool dead() const noexcept { return references == 0 && !held; }

protected:
    ~Storage() = default;
};

// One execution of an operator: what it reads and what it makes.
struct Call : Counted<Call> {
    Call(Graph& graph, OpId call_id, Nanoseconds call_cost, bool can_run_again);

    std::uint32_t n_inputs = 0;
    OpId id;
    Nanoseconds cost;
    Bytes nbytes = 0;  // of the storages whose root is an output
    Edge* edges = nullptr;

    union {
        Value* output = nullptr;  // if there is one at most
        Value** several;
    };

    Overwrite* overwritten = nullptr;
    std::uint32_t n_outputs = 0;
    std::uint32_t n_made = 0;  // outputs that are the root of their storage
    std::uint16_t n_overwrites = 0;
    bool replayable;
    bool ran = false;
    bool linked = false;         // its outputs are counted
    bool has_workspace = false;  // it takes more while it runs: the performer knows how much

    std::span<Edge> inputs() const noexcept { return {edges, n_inputs}; }

    std::span<Value* const> outputs() const noexcept {
        return {n_outputs == 1 ? &output : several, n_outputs};
    }

    std::span<const Overwrite> overwrites() const noexcept { return {overwritten, n_overwrites}; }

    bool views() const noexcept { return n_made < n_outputs; }

protected:
    ~Call() = default;
};

inline bool is_root(const Value& value) noexcept {
    return &value.storage->root == &value;
}

// Builds calls and takes them apart; owns what hangs on them.
class Graph final {
public:
    Graph() = default;
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    Graph(Graph&&) = delete;
    Graph& operator=(Graph&&) = delete;
    ~Graph() = default;

    Graveyard<Storage> dead_storages;
    Graveyard<Call> dead_calls;

    // -- a call, before it is linked ------------------------------------------------------------

    // `call` reads `inputs`, in this order; once.
    void reads(Call& call, std::span<Value* const> inputs);
    // Adds an output in the new `storage`, of its own.
    Value& makes(Call& call, Storage& storage);
    // Adds an output that is a view of `storage`.
    Value& views(Call& call, Storage& storage);
    // The outputs that take over memory of inputs; once.
    void overwrites(Call& call, std::span<const Overwrite> pairs);

    // -- for the ledger -------------------------------------------------------------------------

    // From now on what `call` makes is held by it.
    void link(Call& call);
    // Tells the inputs that they are needed to run this again; not for views of themselves.
    void consume(Call& call);
    // The inputs are not needed for `call` any more.
    void unconsume(Call& call) noexcept;
    // Nobody needs `call` any more: lets go of what it refers to.
    void dissolve(Call& call) noexcept;
    // `storage` is out of the graph: its calls are let go.
    void dissolve(Storage& storage) noexcept;
    // It is about to be destroyed.
    void clean(Storage& storage) noexcept;
    void clean(Call& call) noexcept;

    // What cannot be recomputed without `storage` unless a resident helps; oldest first.
    void made_through(Storage& storage, std::vector<Storage*>& found);
    // What is asked for and could be computed again from the source `storage`, if all of it is
    // there and in the hands of the program alone: added to `found`.
    void ends(Storage& storage, std::vector<Ref<Storage>>& found);
    // Whether it is a dead source from which only what the program keeps anyway could be computed.
    bool useless(Storage& storage);

    // A mark that no storage has: a walk gives it to what it saw.
    std::uint64_t new_mark() noexcept { return ++marks_; }

    // Calls that are linked.
    std::size_t n_calls() const noexcept { return n_calls_; }

    // Bytes of what hangs on storages and calls.
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
    std::vector<Storage*> stack_;  // of a walk; empty between them
};

// -- walks over the graph -------------------------------------------------------------------------

// Each maker of `storage`, once.
template <class F>
void each_maker(Storage& storage, F&& visit) {
    const Call* last = nullptr;
    for (Value* value = storage.first_value(); value != nullptr; value = value->next) {
        if (value->call != last) {  // a call makes all its values in one go
            last = value->call;
            visit(*value->call);
        }
    }
}

// The cost of the calls of `storage`, whether or not there is a copy of it.
inline Nanoseconds recipe_ns(Storage& storage) {
    Nanoseconds total = 0;
    each_maker(storage, [&](const Call& call) { total += call.cost; });
    return total;
}

// What must be resident to compute `storage` again, nothing if there is a copy of it; one of them
// may come more than once.
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

// What `storage` is a parent of; one of them may come more than once.
template <class F>
void each_child(Storage& storage, F&& visit) {
    for (const Edge* edge = storage.first_consumer; edge != nullptr; edge = edge->next) {
        for (Value* value : edge->call->outputs()) {
            Storage& child = *value->storage;
            if (&child != &storage && !child.dissolved && !child.on_host) {
                visit(child);
            }
        }
    }
}

}  // namespace rekindle
