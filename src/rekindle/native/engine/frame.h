// State of a call in progress, and the errors that can end one. Twin of rekindle.engine._frame.
#pragma once

#include <cstddef>
#include <exception>
#include <utility>

#include "../base/types.h"
#include "graph.h"

namespace rekindle {

// Error: the budget is exceeded. All candidates for eviction are evicted, and `needed` more bytes
// do not fit.
struct NoRoom final : std::exception {
    NoRoom(Bytes more, Bytes there, Bytes most, Ref<Call> whose)
        : needed(more), memory(there), budget(most), call(std::move(whose)) {}

    const char* what() const noexcept override {
        return "there is no room, and nothing left to evict";
    }

    Bytes needed;
    Bytes memory;
    Bytes budget;
    Ref<Call> call;  // call of an operator that needs the bytes; null if there is none
};

// Error: the total time of recomputation exceeded the engine's limit.
struct Thrashed final : std::exception {
    Thrashed(Nanoseconds spent, Nanoseconds most) : recompute_ns(spent), limit(most) {}

    const char* what() const noexcept override { return "recomputation took longer than it may"; }

    Nanoseconds recompute_ns;
    Nanoseconds limit;
};

// Error: a value depends on itself, so the engine's graph is damaged.
struct Cyclic final : std::exception {
    const char* what() const noexcept override {
        return "a value is needed to compute itself: the graph is damaged; please report this";
    }
};

// Error: other threads make the inputs of a recomputation unavailable again and again, so that it
// makes no progress.
struct Starved final : std::exception {
    const char* what() const noexcept override {
        return "a value cannot be recomputed, because its inputs become unavailable again and "
               "again: "
               "another thread, for which the operator waits, writes to them or exports them (as "
               "tensor.numpy() does). Do that in the thread that runs the operator, or write "
               "rekindle.never_recompute() around the operator";
    }
};

// Error: while this thread was recomputing a value, another thread removed the value's recipe.
struct Lost final : std::exception {
    const char* what() const noexcept override {
        return "a value that was being recomputed cannot be any more; please report this";
    }
};

// A call that waits for its inputs to be recomputed. Its missing inputs (in reverse order) begin at
// position `pending` of `Engine::pending_`, its locked inputs at position `locked` of
// `Engine::locked_`. Both ranges end where those of the next frame begin.
struct Frame final {
    Call* call;
    Value* wanted;  // value to recompute; null for a first run, which makes all outputs of the call
    std::size_t pending;
    std::size_t locked;
};

// Return true if `value` is not in memory and can be recomputed. Callers check this again after
// events of other threads, which may change both.
inline bool is_missing(const Value& value) noexcept {
    return !value.defined && !value.storage->dissolved && value.storage->replayable;
}

// Return true if the results that `call` has just computed must not be used: another thread
// overwrote an input meanwhile, or removed the call.
inline bool is_outdated(const Call& call) noexcept {
    return call.outdated || (call.ran && !(call.replayable && call.linked));
}

}  // namespace rekindle
