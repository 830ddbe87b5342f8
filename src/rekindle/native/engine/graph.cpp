#include "graph.h"

#include <algorithm>
#include <bit>

#include "../base/assert.h"

namespace rekindle {

namespace {

// `Graph::feeds_evicted` looks at no more children than this. Nearly all searches end at the first
// ones.
constexpr std::size_t MOST_CHILDREN = 1'000;

}  // namespace

Storage::Storage(Graph& graph, StorageId storage_id, Bytes size)
    : Counted(graph.dead_storages), id(storage_id), nbytes(size) {
    root.storage = this;
}

Call::Call(Graph& graph, OpId call_id, Nanoseconds call_cost, bool can_run_again)
    : Counted(graph.dead_calls), id(call_id), cost(call_cost), replayable(can_run_again) {}

// -- a call, before it is linked ------------------------------------------------------------------

void Graph::reads(Call& call, std::span<Value* const> inputs) {
    REKINDLE_ASSERT(call.n_inputs == 0 && !call.linked);
    call.edges = edges_.take(inputs.size());
    call.n_inputs = static_cast<std::uint32_t>(inputs.size());
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        call.edges[i] = Edge{inputs[i], &call, nullptr, nullptr};
        hold(*inputs[i]->storage);
    }
}

Value& Graph::makes(Call& call, Storage& storage) {
    REKINDLE_ASSERT(storage.root.call == nullptr);
    storage.root.call = &call;
    hold(call);
    add_output(call, storage.root);
    ++call.n_made;
    call.nbytes += storage.nbytes;
    return storage.root;
}

Value& Graph::views(Call& call, Storage& storage) {
    Value& made = view_values_.make();
    made.storage = &storage;
    made.call = &call;
    hold(call);
    Value* last = &storage.root;
    while (last->next != nullptr) {
        last = last->next;
    }
    last->next = &made;
    add_output(call, made);
    return made;
}

void Graph::overwrites(Call& call, std::span<const Overwrite> pairs) {
    REKINDLE_ASSERT(call.n_overwrites == 0);
    call.overwritten = overwrites_.take(pairs.size());
    call.n_overwrites = static_cast<std::uint16_t>(pairs.size());
    for (std::size_t i = 0; i < pairs.size(); ++i) {
        call.overwritten[i] = pairs[i];
        hold(*pairs[i].source->storage);
    }
}

void Graph::add_output(Call& call, Value& value) {
    const std::uint32_t n = call.n_outputs;
    if (n == 0) {
        call.output = &value;
        // the array of the call's outputs is full, so double it
    } else if (n == 1 || std::has_single_bit(n)) {
        Value** longer = outputs_.take(std::size_t{2} * n);
        const std::span<Value* const> old = call.outputs();
        std::ranges::copy(old, longer);
        if (n > 1) {
            outputs_.give(call.several, n);
        }
        call.several = longer;
        call.several[n] = &value;
    } else {
        call.several[n] = &value;
    }
    ++call.n_outputs;
}

// -- for the ledger -------------------------------------------------------------------------------

void Graph::link(Call& call) {
    for (Value* value : call.outputs()) {
        hold(*value->storage);
    }
    call.linked = true;
    ++n_calls_;
}

void Graph::consume(Call& call) {
    const bool views = call.views();
    for (Edge& edge : call.inputs()) {
        Storage& storage = *edge.value->storage;
        const std::span<Value* const> outputs = call.outputs();
        if (views && std::ranges::any_of(outputs, [&](const Value* output) {
                return output->storage == &storage;
            })) {
            continue;
        }
        if (storage.last_consumer != nullptr && storage.last_consumer->call == &call) {
            // The list of consumers has this call already, because the call also reads another
            // value of the storage.
            continue;
        }
        edge.previous = storage.last_consumer;
        (edge.previous != nullptr ? edge.previous->next : storage.first_consumer) = &edge;
        storage.last_consumer = &edge;
        hold(call);
    }
}

void Graph::unlink(Edge& edge) noexcept {
    Storage& storage = *edge.value->storage;
    if (edge.previous == nullptr && storage.first_consumer != &edge) [[likely]] {
        return;  // this edge is not in the storage's list of consumers
    }
    (edge.previous != nullptr ? edge.previous->next : storage.first_consumer) = edge.next;
    (edge.next != nullptr ? edge.next->previous : storage.last_consumer) = edge.previous;
    edge.previous = edge.next = nullptr;
    let(*edge.call);
}

void Graph::unconsume(Call& call) noexcept {
    for (Edge& edge : call.inputs()) {
        unlink(edge);
    }
}

void Graph::dissolve(Call& call) noexcept {
    hold(call);
    for (Edge& edge : call.inputs()) {
        unlink(edge);
        let(*edge.value->storage);
    }
    edges_.give(call.edges, call.n_inputs);
    call.n_inputs = 0;
    for (const Overwrite& pair : call.overwrites()) {
        let(*pair.source->storage);
    }
    overwrites_.give(call.overwritten, call.n_overwrites);
    call.n_overwrites = 0;
    if (call.linked) {
        for (Value* value : call.outputs()) {
            let(*value->storage);
        }
        call.linked = false;
        --n_calls_;
    }
    if (call.n_outputs > 1) [[unlikely]] {
        outputs_.give(call.several, std::bit_ceil(call.n_outputs));
    }
    call.output = nullptr;
    call.n_outputs = call.n_made = 0;
    let(call);
}

void Graph::dissolve(Storage& storage) noexcept {
    for (Value* value = storage.first_value(); value != nullptr; value = value->next) {
        let(*value->call);
    }
    storage.dissolved = true;
}

void Graph::clean(Storage& storage) noexcept {
    // A storage whose first value has a call, but was not dissolved, was never linked into the
    // graph.
    if (!storage.dissolved && storage.root.call != nullptr) [[unlikely]] {
        dissolve(storage);
    }
    Value* view = storage.root.next;
    while (view != nullptr) [[unlikely]] {
        Value* next = view->next;
        view_values_.drop(*view);
        view = next;
    }
}

void Graph::clean(Call& call) noexcept {
    // Hold a reference, so that `call` is not added to the list of unreferenced objects again while
    // its links are removed.
    call.count = 1;
    dissolve(call);
}

void Graph::made_through(Storage& storage, std::vector<Storage*>& found) {
    const std::uint64_t mark = new_mark();
    stack_.push_back(&storage);
    while (!stack_.empty()) {
        Storage& last = *stack_.back();
        stack_.pop_back();
        each_child(last, [&](Storage& child) {
            if (child.mark != mark) {
                child.mark = mark;
                found.push_back(&child);
                if (!child.resident) {
                    stack_.push_back(&child);
                }
            }
        });
    }
    std::ranges::sort(found, {}, &Storage::id);
}

bool Graph::feeds_evicted(Storage& storage) {
    const std::uint64_t mark = new_mark();
    std::size_t looked_at = 0;
    bool feeds = false;
    storage.mark = mark;
    stack_.push_back(&storage);
    while (!feeds && !stack_.empty()) {
        Storage& last = *stack_.back();
        stack_.pop_back();
        feeds = any_child(last, [&](Storage& child) {
            if (++looked_at > MOST_CHILDREN) {
                return true;
            }
            if (child.resident || child.mark == mark) {
                return false;
            }
            child.mark = mark;
            if (child.dead()) {
                stack_.push_back(&child);
            }
            return !child.dead();
        });
    }
    stack_.clear();
    return feeds && looked_at <= MOST_CHILDREN;
}

bool Graph::useless(Storage& storage) {
    if (!storage.dead() || !storage.consumed()) {
        return false;
    }
    const std::uint64_t mark = new_mark();
    bool wanted = false;
    storage.mark = mark;
    stack_.push_back(&storage);
    while (!stack_.empty()) {
        Storage& last = *stack_.back();
        stack_.pop_back();
        each_child(last, [&](Storage& child) {
            if (!child.dead()) {
                wanted = wanted || !(child.resident && child.held);
            } else if (child.mark != mark) {
                child.mark = mark;
                stack_.push_back(&child);
            }
        });
        if (wanted) {
            stack_.clear();
        }
    }
    return !wanted;
}

void Graph::ends(Storage& storage, std::vector<Ref<Storage>>& found) {
    const std::uint64_t mark = new_mark();
    const std::size_t before = found.size();
    bool wanted = false;
    stack_.push_back(&storage);
    while (!stack_.empty() && !wanted) {
        Storage& last = *stack_.back();
        stack_.pop_back();
        each_child(last, [&](Storage& child) {
            if (child.mark == mark) {
                return;
            }
            child.mark = mark;
            if (child.dead()) {
                stack_.push_back(&child);
                return;
            }
            wanted = wanted || child.references != 0 || !(child.resident && child.held);
            found.emplace_back(&child);
        });
    }
    stack_.clear();
    if (wanted) {
        found.resize(before);
    }
}

std::size_t Graph::nbytes() const noexcept {
    return view_values_.nbytes() + edges_.nbytes() + outputs_.nbytes() + overwrites_.nbytes();
}

}  // namespace rekindle
