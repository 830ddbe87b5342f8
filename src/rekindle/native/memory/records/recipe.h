// Recipes: the operator calls by which values were computed, and how to repeat them without side
// effects.
//
// A `Recipe` (R2, recipes) is the torch side of an engine's `Call`. `run_again` repeats (replays)
// the call. It draws the same random numbers (R5, randomness), and writes no memory that other code
// can see (R3, in-place writes; R6, hidden writes).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <vector>

#include "../../engine/graph.h"
#include "../../ops/errors.h"
#include "../../ops/signature.h"
#include "../../torch/rng_history.h"
#include "../../torch/storage_ptr.h"
#include "../slices/sliced_call.h"

namespace rekindle {

// The recipe of the outputs of one operator call: the operator and its arguments. The inputs of the
// engine's `Call` are the tensor arguments in order (but see `first_is_last`), without those that a
// recomputation leaves out.
struct Recipe final : Call {
    Recipe(Graph& graph, OpId number, Nanoseconds price, bool can_run_again, const Facts* what)
        : Call(graph, number, price, can_run_again), facts(what) {}

    // Grad mode was on at the call. It is the first member because it fits into the tail padding of
    // `Call`.
    bool grad_mode = true;
    const Facts* facts;  // operator; null if the call stands for no operator of the program
    c10::intrusive_ptr<Signature> signature;

    // Parts of a recipe that few operators need.
    struct Aside final {
        RngCheckpoints random;
        std::vector<c10::IValue> unkeyed_args;
        // Positions of the tensor arguments that the operator writes.
        c10::SmallVector<std::uint32_t, 2> written;
        // The tensors in `written` are running statistics. A recomputation does not update them, so
        // that each call of the program updates them once (R6, hidden writes).
        bool statistics = false;
        // The first argument is the last input of the engine's `Call`, so that it is recomputed
        // last: `empty` made it, and its memory would be idle while the others are recomputed.
        bool first_is_last = false;
        // Bytes that the operator uses internally while it runs.
        Bytes workspace = 0;
        // The results are computed in slices, because an argument has never been in memory. The
        // inputs of the engine's `Call` are then the leaves of `sliced`. Null: as a whole.
        SlicedCallPtr sliced;
        std::int64_t slices = 0;  // in how many slices the last run of the call was
        bool is_given = false;    // the program has the result, so it must be had
    };

    std::unique_ptr<Aside> aside;

    std::span<const std::unique_ptr<RngCheckpoint>> random() const noexcept {
        return aside ? std::span<const std::unique_ptr<RngCheckpoint>>(aside->random)
                     : std::span<const std::unique_ptr<RngCheckpoint>>();
    }

    std::span<const c10::IValue> unkeyed_args() const noexcept {
        return aside ? std::span<const c10::IValue>(aside->unkeyed_args)
                     : std::span<const c10::IValue>();
    }

    std::span<const std::uint32_t> written() const noexcept {
        return aside ? std::span<const std::uint32_t>(aside->written)
                     : std::span<const std::uint32_t>();
    }

    // Return the call by which the results are computed in slices, or null.
    const SlicedCallPtr& sliced() const noexcept {
        static const SlicedCallPtr none;
        return aside ? aside->sliced : none;
    }

    bool statistics() const noexcept { return aside && aside->statistics; }

    // Return the value of tensor argument `index`. Arguments that a recomputation leaves out do not
    // count.
    const Value& argument(std::size_t index) const noexcept {
        const bool shifted = aside && aside->first_is_last;
        return *inputs()[shifted ? (index + n_inputs - 1) % n_inputs : index].value;
    }

    const char* name() const noexcept { return facts == nullptr ? "source" : facts->name.c_str(); }
};

inline Recipe& recipe_of(Call& call) noexcept {
    return static_cast<Recipe&>(call);
}

// Return the call by which `storage`, a value without room, is computed in slices; null for another
// value.
inline const SlicedCallPtr& sliced_call_of(const Storage& storage) noexcept {
    static const SlicedCallPtr none;
    const bool is_evicted = !storage.resident && !storage.on_host && storage.replayable;
    return is_evicted && storage.root.call != nullptr ? recipe_of(*storage.root.call).sliced()
                                                      : none;
}

// Return true if `recipe`, which computes its single result as a whole, could do so in slices.
bool can_run_in_slices(const Recipe& recipe);

// Return true if a recomputation passes scratch tensors in place of the running statistics, of
// which one has the geometry `statistic`. Else it passes none: but the dtypes of the results follow
// from statistics that are more precise than the input.
inline bool needs_scratch(const Signature& signature, const Geometry& statistic) {
    return signature.facts.written != 0 || signature.geometries[0].dtype != statistic.dtype;
}

// `Kernel` runs the kernel of a recomputation. `Calling` is the type of the caller's function that
// runs the kernel, given the storages of its operands.
using Kernel = c10::function_ref<void()>;
using Calling = c10::function_ref<void(std::span<const StoragePtr>, Kernel)>;
// Run the operator call of `recipe` again. With `in_place` the kernel writes into the inputs that
// it overwrote on the first run, otherwise into copies of them. `calling` runs the kernel, given
// its operands. `room` is the memory in bytes that a call in slices may use beside its results.
//
// Return the storages of the outputs, in the order of the results.
c10::SmallVector<StoragePtr, 2> run_again(
    const Recipe& recipe, bool in_place, Bytes room, Calling calling
);

}  // namespace rekindle
