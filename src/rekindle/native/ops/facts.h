// Properties of operators that the runtime needs, derived once per overload.
//
// Most follow from the schema. The tables of rekindle.pytorch.operators._operators complete and
// correct it; Python passes them at start.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace rekindle {

// Properties of the contents of a storage. A reader must check them.
inline constexpr std::uint8_t UNWRITTEN = 2;  // Made by `empty`, and no operator has written to it.
inline constexpr std::uint8_t ZEROED = 4;     // Made by `zeros`, and no operator has written to it.

// Entries of the tables for one operator. `statistics` are three positions; -1 if there is none:
// the running mean and variance, which it writes although its schema denies that, and the flag that
// enables the writes (R6).
struct Traits final {
    static constexpr std::uint32_t ROUTING = 1;
    static constexpr std::uint32_t INDEXING = 2;
    static constexpr std::uint32_t EMPTY = 4;
    static constexpr std::uint32_t ZEROS = 8;
    static constexpr std::uint32_t OVERWRITING = 16;
    static constexpr std::uint32_t SEES_REQUIRES_GRAD = 32;
    static constexpr std::uint32_t OPAQUE = 64;
    static constexpr std::uint32_t RANDOM = 128;
    static constexpr std::uint32_t STATISTICS = 256;
    static constexpr std::uint32_t COUNTED_FIRST = 512;
    static constexpr std::uint32_t COLLECTIVE = 1024;  // Writes its first argument.
    // Has a name like a collective, and writes nothing.
    static constexpr std::uint32_t HARMLESS = 2048;
    static constexpr std::uint32_t REDUCED_IN_PLACE = 4096;
    // Operators that may compute other bits when they run again on a device (`_doubtful`).
    static constexpr std::uint32_t ATOMICS = 8192;
    static constexpr std::uint32_t ACCUMULATES = 16384;
    static constexpr std::uint32_t TIMED = 32768;
    static constexpr std::uint32_t CONJUGATING = 65536;
    static constexpr std::uint32_t QUERY = 131072;  // Reads no element, and makes no tensor.
    static constexpr std::uint32_t TRIED = 262144;  // Runs again only after a trial.
    static constexpr std::uint32_t DOUBT = ATOMICS | ACCUMULATES | TIMED;

    std::uint32_t flags = 0;
    std::array<int, 3> statistics{-1, -1, -1};
    int accumulate = -1;  // Position of the flag that makes it accumulate; -1 if there is none.
};

// Entry for an operator that is the whole formula of some autograd nodes: their gradient with
// respect to one input, computed from the incoming gradient and one saved tensor.
struct InPlace final {
    std::string name;
    std::string overload;
    std::string twin;                // The overload that writes into a tensor it is given.
    std::vector<std::string> nodes;  // Names of the autograd nodes.
};

// Properties of one overload.
struct Facts final {
    std::string name;
    std::uint32_t arguments = 0;
    std::uint32_t returns = 0;
    std::uint64_t written = 0;  // Bits of the first 64 arguments that it writes.
    // Bits of arguments. If all are set, it draws from a generator state in its arguments.
    std::uint64_t rng_state_args = 0;
    // Position of the argument that chooses the device of the result; -1 if there is none.
    int device = -1;
    int dtype = -1;  // Position of the argument with the dtype of the input; -1 if there is none.
    Traits traits;
    std::uint8_t content = 0;      // Properties of its results until an operator writes to them.
    bool view = false;             // Returns only views: no memory, no work.
    bool composed = false;         // Calls other operators, which reach the fallback themselves.
    bool moves = false;            // Gives a tensor another storage.
    bool returns_tensors = false;  // If false, it makes no tensor.
    bool returns_written = false;  // Returns only tensors that it writes.
    bool random = false;
    bool dynamic = false;         // Sizes of its results depend on values of arguments.
    bool resizes = false;         // May change the size of a storage.
    bool writes = false;          // Includes writes of statistics.
    bool opaque = false;          // Never runs again.
    bool differentiated = false;  // Has its own backward pass, and runs with grad mode off.
    bool unseen = false;          // May write unknown memory (R11).
    bool product = false;  // A matrix product or similar, for which a precision can be chosen.
    bool may_use_workspace = false;   // May need more workspace than its outputs take, on a CPU.
    bool marks = false;               // Begins or ends a range of the profiler.
    bool ends = false;                // Ends a range of the profiler.
    bool retryable_after_oom = true;  // Can be called again after it ran out of memory.
    bool region = false;   // Code compiled by Inductor (R12), which may draw from any generator.
    bool unit = false;     // The forward pass of an autograd.Function.
    bool talks = false;    // Talks to other processes or to the outside.
    bool removed = false;  // The operator was deregistered, or another took its name.
    const InPlace* in_place = nullptr;        // Null if its result never takes over an operand.
    std::optional<c10::OperatorHandle> twin;  // Set if `in_place` is.

    bool has(std::uint32_t trait) const noexcept { return (traits.flags & trait) != 0; }
};

// Add an entry of the tables. Called before the first operator.
void learn_traits(std::string name, const Traits& traits);
// Never run operators of this namespace again, because they have external effects (R9).
void learn_effects(std::string name_space);
// Add a part of the names of operators that compute products.
void learn_products(std::string part);
// Add a part of the names of operators with large workspaces on a CPU.
void learn_workspace_operators(std::string part);
// Add an operator whose result may take over its first argument.
void learn_in_place(InPlace entry);
// Let `facts_of` notice deregistered operators. Called once.
void see_removals();
// Return the facts of an operator. Requires the session mutex.
const Facts& facts_of(const c10::OperatorHandle& op);
// Return true if the operator was deregistered. Requires the session mutex.
bool was_removed(const Facts& facts);

}  // namespace rekindle
