// What the runtime must know about an operator, learned once for each overload.
//
// The schema says most of it. Where it is silent or wrong the tables of
// rekindle.pytorch.operators._operators do: they are told at start, and written down nowhere else.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace rekindle {

// What is special about the content of a memory, so that reading it needs a second look.
inline constexpr std::uint8_t UNWRITTEN = 2;  // made by `empty`, and no operator has written to it
inline constexpr std::uint8_t ZEROED = 4;     // made by `zeros`, likewise

// What the tables of the twin say of a name. `statistics`: positions of the running statistics that
// it writes although the schema denies it, and of the flag that says whether (R6); -1: none.
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
    static constexpr std::uint32_t COLLECTIVE = 1024;  // writes its first argument
    static constexpr std::uint32_t HARMLESS = 2048;    // named like one, and writes nothing
    static constexpr std::uint32_t REDUCED_IN_PLACE = 4096;
    // Of what may give other bits when it runs again on a device (`_doubtful`).
    static constexpr std::uint32_t ATOMICS = 8192;
    static constexpr std::uint32_t ACCUMULATES = 16384;
    static constexpr std::uint32_t TIMED = 32768;
    static constexpr std::uint32_t CONJUGATING = 65536;
    static constexpr std::uint32_t QUERY = 131072;  // reads no element, and makes nothing
    static constexpr std::uint32_t DOUBT = ATOMICS | ACCUMULATES | TIMED;

    std::uint32_t flags = 0;
    std::array<int, 3> statistics{-1, -1, -1};
    int accumulate = -1;  // the position of the argument that says whether it adds
};

struct Facts final {
    std::string name;
    std::uint32_t arguments = 0;
    std::uint32_t returns = 0;
    std::uint64_t written = 0;    // which of the first 64 arguments are
    std::uint64_t own_state = 0;  // if all of these draw, then from an argument
    int device = -1;              // the position of the argument that says where the result is
    Traits traits;
    std::uint8_t content = 0;      // of a result until somebody writes to it
    bool view = false;             // returns views only: no memory, no work
    bool composed = false;         // of other operators, which come here themselves
    bool moves = false;            // gives a tensor other memory
    bool returns_tensors = false;  // else it makes none
    bool returns_written = false;  // what it writes, and nothing beside
    bool random = false;
    bool dynamic = false;         // sizes of results depend on the content of arguments
    bool resizes = false;         // may change the size of a storage
    bool writes = false;          // statistics included
    bool opaque = false;          // never run again
    bool differentiated = false;  // has a backward pass of its own: it runs with grad mode off
    bool unseen = false;          // may write nobody knows what (R11)
    bool product = false;         // of matrices or the like: there is a precision to choose
    bool roomy = false;           // on a CPU: takes more inside itself than it makes, maybe
    bool marks = false;           // a range of the profiler begins or ends
    bool ends = false;            // it ends
    bool starts_anew = true;      // out of memory it can be called once more
    bool region = false;          // compiled code, which draws from every generator there is
    bool removed = false;         // there is no such operator any more, or another of that name

    bool has(std::uint32_t trait) const noexcept { return (traits.flags & trait) != 0; }
};

// The tables as the twin has them. Once, before the first operator.
void learn_traits(std::string name, const Traits& traits);
// Operators of these namespaces talk to the outside and are never run again (R9).
void learn_effects(std::string name_space);
// In the names of operators that sum up products.
void learn_products(std::string part);
// In the names of operators that on a CPU take more inside themselves than they make.
void learn_roomy(std::string part);
// From now on `facts_of` hears of operators that are removed. Once.
void see_removals();
// The facts of an operator. Not without the core's lock.
const Facts& facts_of(const c10::OperatorHandle& op);
// Whether the operator that `facts` are of is there no more. Not without the core's lock.
bool was_removed(const Facts& facts);

}  // namespace rekindle
