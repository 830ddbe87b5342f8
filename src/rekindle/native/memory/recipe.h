// Runs a recorded call again, as the first time, touching nothing that anyone else sees.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "../engine/graph.h"
#include "../ops/errors.h"
#include "../ops/signature.h"
#include "../torch/homes.h"
#include "../torch/positions.h"

namespace rekindle {

// How a call made its results. Its inputs are the tensor arguments, in order, but for those that
// are left out.
struct Recipe final : Call {
    Recipe(Graph& graph, OpId number, Nanoseconds price, bool can_run_again, const Facts* what)
        : Call(graph, number, price, can_run_again), facts(what) {}

    bool grad_mode = true;  // first: it lies in what is left of a Call's last word
    const Facts* facts;     // null: no operator of the program's
    c10::intrusive_ptr<Signature> signature;

    // What few calls have.
    struct Aside final {
        Noted random;
        std::vector<c10::IValue> extras;
        c10::SmallVector<std::uint32_t, 2> written;  // which of the tensors the operator writes
        bool statistics = false;                     // those are left out: they move only once (R6)
        Bytes workspace = 0;  // what it takes beside its results while it runs
    };

    std::unique_ptr<Aside> aside;

    std::span<const std::unique_ptr<Position>> random() const noexcept {
        return aside ? std::span<const std::unique_ptr<Position>>(aside->random)
                     : std::span<const std::unique_ptr<Position>>();
    }

    std::span<const c10::IValue> extras() const noexcept {
        return aside ? std::span<const c10::IValue>(aside->extras) : std::span<const c10::IValue>();
    }

    std::span<const std::uint32_t> written() const noexcept {
        return aside ? std::span<const std::uint32_t>(aside->written)
                     : std::span<const std::uint32_t>();
    }

    bool statistics() const noexcept { return aside && aside->statistics; }

    const char* name() const noexcept { return facts == nullptr ? "source" : facts->name.c_str(); }
};

inline Recipe& recipe_of(Call& call) noexcept {
    return static_cast<Recipe&>(call);
}

// The memory of what `recipe` makes, in the order of its roots. With `in_place` it writes the
// memory of the inputs that it overwrites, else copies of them.
// The kernel runs within `calling`, with its operands.
using Kernel = c10::function_ref<void()>;
using Calling = c10::function_ref<void(std::span<const Home>, Kernel)>;
c10::SmallVector<Home, 2> run_again(const Recipe& recipe, bool in_place, Calling calling);

}  // namespace rekindle
