// Properties of operators that the runtime needs, derived once per overload.
//
// Most properties follow from the operator's schema. The tables of
// rekindle.pytorch.operators._operators complete and correct them; Python passes the tables at
// start.
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

// Properties of the contents of a storage. An operator that reads the storage must check them.
inline constexpr std::uint8_t UNWRITTEN = 2;  // Made by `empty`, and no operator has written to it.
inline constexpr std::uint8_t ZEROED = 4;     // Made by `zeros`, and no operator has written to it.

// Python's table entries for one operator. `statistics` are three argument positions, -1 if there
// is none: the running mean and variance, which the operator writes although its schema denies
// that, and the flag that enables these writes (R6).
struct Traits final {
    // Flags, one for each table of operators in rekindle.pytorch.operators._traits, which explains
    // them.
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
    // Flag: the operator writes its first argument, although its schema denies that.
    static constexpr std::uint32_t COLLECTIVE = 1024;
    // Flag: the operator's name looks like that of a collective, but the operator writes nothing.
    static constexpr std::uint32_t HARMLESS = 2048;
    static constexpr std::uint32_t REDUCED_IN_PLACE = 4096;
    // Flags of operators that may give other bits when they are recomputed on a device
    // (`_doubtful`).
    static constexpr std::uint32_t ATOMICS = 8192;
    static constexpr std::uint32_t ACCUMULATES = 16384;
    static constexpr std::uint32_t TIMED = 32768;
    static constexpr std::uint32_t CONJUGATING = 65536;
    // Flag: the operator reads no element of a tensor, and makes no tensor.
    static constexpr std::uint32_t QUERY = 131072;
    // Flag: the operator is recomputed only after a trial (ops/probation.h).
    static constexpr std::uint32_t TRIED = 262144;
    static constexpr std::uint32_t DOUBT = ATOMICS | ACCUMULATES | TIMED;

    std::uint32_t flags = 0;
    std::array<int, 3> statistics{-1, -1, -1};
    // Position of the flag that makes the operator accumulate; -1 if there is none.
    int accumulate = -1;
};

// Table entry for a backward operator whose result may overwrite the incoming gradient. In some
// autograd nodes, the operator alone computes the gradient of one input, from the incoming gradient
// and one saved tensor.
struct InPlace final {
    std::string name;
    std::string overload;
    // The operator's overload that writes the result into a given tensor.
    std::string twin;
    // Names of the autograd nodes in which the operator computes that gradient.
    std::vector<std::string> nodes;
};

// Properties of one operator overload. In the comments below, "it" is the operator.
struct Facts final {
    std::string name;
    std::uint32_t arguments = 0;
    std::uint32_t returns = 0;
    std::uint64_t written = 0;  // Bit mask of the arguments (the first 64) that it writes.
    // Bit mask of arguments. If the program passes all of them, the operator draws random numbers
    // from a generator state that they contain.
    std::uint64_t rng_state_args = 0;
    // Position of the argument that gives the device of the result; -1 if there is none.
    int device = -1;
    // Position of the argument that gives the dtype of the input; -1 if there is none.
    int dtype = -1;
    Traits traits;
    // `UNWRITTEN` or `ZEROED`: contents of its results until another operator writes to them; else
    // 0.
    std::uint8_t content = 0;
    bool view = false;  // Returns only views: allocates nothing and computes nothing.
    // True if the operator calls other operators, which the runtime's fallback sees on their own.
    bool composed = false;
    bool moves = false;            // Gives a tensor another storage (`set_`).
    bool returns_tensors = false;  // False only if no result is a tensor.
    bool returns_written = false;  // Returns only arguments that it writes.
    bool random = false;
    bool dynamic = false;         // Sizes of its results depend on values of arguments.
    bool resizes = false;         // May change the size of a storage.
    bool writes = false;          // Writes an argument, running statistics included.
    bool opaque = false;          // Must never be recomputed.
    bool differentiated = false;  // Has its own backward pass, and runs with grad mode off.
    bool unseen = false;          // May write memory that is in no argument (R11).
    bool product = false;  // A matrix product or similar, for which a precision can be chosen.
    bool may_use_workspace = false;   // On a CPU, may need more workspace than its outputs take.
    bool marks = false;               // Begins or ends a range of the profiler.
    bool ends = false;                // Ends a range of the profiler.
    bool retryable_after_oom = true;  // Can be called again after it ran out of memory.
    // A function compiled by Inductor (R12), which may draw from any generator.
    bool region = false;
    bool unit = false;   // The forward pass of an autograd.Function.
    bool talks = false;  // Communicates with other processes or the outside world.
    // True if the operator was removed from the dispatcher, or another operator got its name.
    bool removed = false;
    // Table entry; null if it never writes its result over an operand.
    const InPlace* in_place = nullptr;
    std::optional<c10::OperatorHandle> twin;  // Operator `in_place->twin`; set if `in_place` is.

    bool has(std::uint32_t trait) const noexcept { return (traits.flags & trait) != 0; }
};

// Add a Python table entry for the operator `name`. Called before the first operator runs.
void learn_traits(std::string name, const Traits& traits);
// Never recompute operators of the namespace `name_space`, because they have external effects (R9).
void learn_effects(std::string name_space);
// Add `part` to the name parts of matrix products: operators whose name contains it are products.
void learn_products(std::string part);
// Add `part` to the name parts of operators that have large workspaces on a CPU.
void learn_workspace_operators(std::string part);
// Register an operator whose result may take over the memory of its first argument.
void learn_in_place(InPlace entry);
// Subscribe to the dispatcher's reports of removed operators, so that `facts_of` forgets them.
// Called once.
void watch_removed_operators();
// Return the facts of an operator. Requires the session mutex.
const Facts& facts_of(const c10::OperatorHandle& op);
// Return true if the operator was removed from the dispatcher. Requires the session mutex.
bool was_removed(const Facts& facts);

}  // namespace rekindle
