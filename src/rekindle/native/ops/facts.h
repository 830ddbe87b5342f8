// Properties of operators that the runtime needs, derived once per overload.
//
// Most properties follow from the operator's schema. The tables in
// rekindle.pytorch.operators._operators complete and correct the schema. Python passes these tables
// to the core at the start.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

namespace rekindle {

// Flags for the contents of a storage, which the runtime checks before an operator reads it. Made
// by `torch.empty`; operators have not written all of it since (memory/records/unwritten_bytes.h).
inline constexpr std::uint8_t UNWRITTEN = 2;
inline constexpr std::uint8_t ZEROED = 4;  // Made by `torch.zeros`, and not written since.

// Python's table entries for one operator. `statistics` are the positions of three arguments, -1 if
// there is none. The first two are the running mean and variance, which the operator writes
// although its schema does not say so (R6, hidden writes). The third is the flag that enables these
// writes.
struct Traits final {
    // Flags of operators. Each flag belongs to a table of operators in
    // rekindle.pytorch.operators._traits, and is explained there.
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
    // Flag: the operator writes its first argument, although its schema does not say so.
    static constexpr std::uint32_t COLLECTIVE = 1024;
    // Flag: the operator's name looks like that of a collective, but the operator writes nothing.
    static constexpr std::uint32_t HARMLESS = 2048;
    static constexpr std::uint32_t REDUCED_IN_PLACE = 4096;
    // Flags of operators that may give other bits when they are recomputed on an accelerator. See
    // rekindle.pytorch.operators._doubtful.
    static constexpr std::uint32_t ATOMICS = 8192;
    static constexpr std::uint32_t ACCUMULATES = 16384;
    static constexpr std::uint32_t TIMED = 32768;
    static constexpr std::uint32_t CONJUGATING = 65536;
    // Flag: the operator reads no element of a tensor, and makes no tensor.
    static constexpr std::uint32_t QUERY = 131072;
    // Flag: the operator is recomputed on trial only (ops/probation.h). Every operator that is not
    // PyTorch's own has the flag.
    static constexpr std::uint32_t TRIED = 262144;
    // Flag: given floating-point numbers, the results have at most four times the bytes of the
    // tensor arguments.
    static constexpr std::uint32_t LIKE_ARGUMENTS = 524288;
    static constexpr std::uint32_t DOUBT = ATOMICS | ACCUMULATES | TIMED;

    std::uint32_t flags = 0;
    std::array<int, 3> statistics{-1, -1, -1};
    // Position of the argument `accumulate` of `index_put` and the like; -1 if there is none.
    int accumulate = -1;
};

// Table entry for a backward operator whose result may be written over the incoming gradient. In
// the autograd nodes `nodes`, this operator alone computes the gradient of one input, from the
// incoming gradient and one saved tensor.
struct InPlace final {
    std::string name;
    std::string overload;
    // Name of the operator's overload that writes the result into a given tensor.
    std::string twin;
    // Names of the autograd nodes that use the operator in this way.
    std::vector<std::string> nodes;
    // The last type of nodes whose name was compared with `nodes`, and whether it is one of them.
    mutable const std::type_info* last_type = nullptr;
    mutable bool last_is_listed = false;
};

// Which products an operator sums, if any: those of matrices, or unknown ones.
enum class Products : std::uint8_t { none, matrix, any };

// Properties of one operator overload.
struct Facts final {
    std::string name;
    bool is_aten = false;  // The operator is one of PyTorch's own.
    std::uint32_t arguments = 0;
    std::uint32_t returns = 0;
    // Bit mask of the arguments (the first 64) that the operator writes.
    std::uint64_t written = 0;
    // Bit mask of the arguments that pass a generator state (such as a seed and an offset). If the
    // program passes all of them, the operator draws random numbers from that state, else from a
    // generator.
    std::uint64_t rng_state_args = 0;
    // Position of the operator's argument `device`; -1 if there is none.
    int device = -1;
    // Position of the operator's argument `input_dtype`; -1 if there is none.
    int dtype = -1;
    Traits traits;
    // Contents of the operator's results until another operator writes them: `UNWRITTEN`, `ZEROED`,
    // or 0 for any other contents.
    std::uint8_t content = 0;
    bool view = false;  // The operator only returns views: it allocates and computes nothing.
    // The operator is `copy_`: it writes element by element what it reads, into its first argument.
    bool copies = false;
    // The operator only calls other operators. The runtime's fallback kernel gets each of these
    // calls.
    bool composed = false;
    bool moves = false;            // The operator gives a tensor another storage (`set_`).
    bool returns_tensors = false;  // At least one result of the operator is a tensor.
    bool returns_written = false;  // The operator returns only arguments that it writes.
    bool random = false;
    bool dynamic = false;  // Sizes of the results depend on contents of arguments.
    bool resizes = false;  // The operator may change the size of a storage.
    // The operator writes an argument, running statistics included.
    bool writes = false;
    bool opaque = false;  // The operator must never be recomputed.
    // The operator has its own backward pass, and runs with grad mode off.
    bool differentiated = false;
    // The operator may write memory that is in no argument, so it is refused (R11, refuse loudly).
    bool unseen = false;
    // The operator sums products, so PyTorch's precision settings affect it.
    Products products = Products::none;
    bool may_use_workspace = false;  // On a CPU, the operator's workspace may exceed its results.
    bool marks = false;              // The operator begins or ends a range of the profiler.
    bool ends = false;               // The operator ends a range of the profiler.
    // The operator can be called again after an out-of-memory error.
    bool retryable_after_oom = true;
    // The operator is a function compiled by Inductor (R12, compiled regions), which may draw from
    // any random generator.
    bool region = false;
    bool unit = false;   // The operator is the forward of an autograd.Function.
    bool talks = false;  // The operator communicates with other processes.
    // The operator is one of PyTorch's own. It does nothing but read its arguments and make
    // tensors, or write its first argument.
    bool simple = false;
    // The operator does the same with each tensor of a list, or of several lists of equal length,
    // as `_foreach_add_` and `_fused_adam_` do (dispatch/several_calls.h).
    bool on_lists = false;
    // Number of signatures of the operator that were tried. Guarded by the session mutex.
    mutable int tried = 0;
    // The operator was removed from the dispatcher, or another operator got its name.
    bool removed = false;
    // The operator's table entry; null if the result is never written over an operand.
    const InPlace* in_place = nullptr;
    std::optional<c10::OperatorHandle> twin;  // The operator's overload `in_place->twin`.

    bool has(std::uint32_t trait) const noexcept { return (traits.flags & trait) != 0; }
};

// Add Python's table entries for the operator `name`. Called before the first operator runs.
void learn_traits(std::string name, const Traits& traits);
// Never recompute operators of the namespace `name_space`, because they have external effects (R9,
// everything else runs once).
void learn_effects(std::string name_space);
// Treat operators of the namespace `name_space` as PyTorch's own: they are recomputed untried.
void learn_own(std::string name_space);
// Return true for an operator of a namespace with external effects.
bool has_effects(std::string_view name);
// Treat operators whose name contains `part` as sums of products, whose precision can be chosen.
void learn_products(std::string part);
// Treat operators whose name contains `part` as operators with large workspaces on a CPU.
void learn_workspace_operators(std::string part);
// Register a backward operator whose result may be written over its first argument.
void learn_in_place(InPlace entry);
// Ask the dispatcher to report removed operators, so that `facts_of` forgets their facts. Called
// once.
void watch_removed_operators();
// Return the properties of an operator. Requires the session mutex.
const Facts& facts_of(const c10::OperatorHandle& op);
// Return true if the operator was removed from the dispatcher. Requires the session mutex.
bool was_removed(const Facts& facts);

}  // namespace rekindle
