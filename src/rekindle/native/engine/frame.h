// A call in progress, and how a call in progress can end. Twin of rekindle.engine._frame.
#pragma once

#include <cstddef>
#include <exception>
#include <utility>

#include "../base/types.h"
#include "graph.h"

namespace rekindle {

// Everything that may be let go has been, and `needed` bytes do not fit.
struct NoRoom final : std::exception {
    NoRoom(Bytes more, Bytes there, Bytes most, Ref<Call> whose)
        : needed(more), memory(there), budget(most), call(std::move(whose)) {}

    const char* what() const noexcept override { return "no room, and nothing to let go"; }

    Bytes needed;
    Bytes memory;
    Bytes budget;
    Ref<Call> call;  // null: no call needs them
};

// Recomputation took longer than `Rules::recompute_limit`.
struct Thrashed final : std::exception {
    Thrashed(Nanoseconds spent, Nanoseconds most) : recompute_ns(spent), limit(most) {}

    const char* what() const noexcept override { return "recomputation took longer than it may"; }

    Nanoseconds recompute_ns;
    Nanoseconds limit;
};

// A value is an input of the calls that make it, directly or not: the graph is damaged.
struct Cyclic final : std::exception {
    const char* what() const noexcept override {
        return "a value would have to be there before it can be computed; please report this";
    }
};

// What a call in progress waits with is taken away again and again, whatever it does.
struct Starved final : std::exception {
    const char* what() const noexcept override {
        return "while a value is recomputed, what it is computed from is taken away again and "
               "again: "
               "another thread, which the operator waits for, writes it or hands it out (as "
               "tensor.numpy() does). Do that in the thread that runs the operator, or write "
               "rekindle.never_recompute() around the operator";
    }
};

// Another thread took the last way to compute a value that this one waits for.
struct Lost final : std::exception {
    const char* what() const noexcept override {
        return "a value that was being recomputed cannot be any more; please report this";
    }
};

// A call in progress: its inputs still to be had (last first), and those locked for it, are the
// ends of the engine's stacks from here on.
struct Frame final {
    Call* call;
    Value* wanted;  // null: all outputs, for the first time
    std::size_t pending;
    std::size_t locked;
    bool gave_up = false;  // what it had locked, to make room for an input, in vain or not
};

}  // namespace rekindle
