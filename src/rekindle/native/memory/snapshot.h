// Who holds memory at one moment: numbers only, cheap to take at every new peak. Python turns them
// into words when somebody asks (rekindle.pytorch.native._snapshots).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../base/types.h"
#include "../torch/homes.h"

namespace rekindle {

// The number of one allocation: memory keeps it when its value changes, or becomes known to the
// engine; an address that is used a second time gets another one.
using AllocationId = std::int64_t;

// One piece of memory.
struct Holder final {
    static constexpr int REPLAYABLE = 1;
    static constexpr int PINNED = 2;
    static constexpr int HELD = 4;        // the program keeps it as well
    static constexpr int REFERENCED = 8;  // by autograd
    static constexpr int CONSUMED = 16;   // recipes read it
    static constexpr int PARAMETER = 32;
    static constexpr int COUNTED = 64;  // no recipe and no graph knows it

    Bytes nbytes;
    AllocationId allocation;
    int flags;
    const char* site;       // the operator that made it
    const void* parameter;  // Python's object for the parameter that it is; null: it is none
    StorageId storage;      // negative: no recipe and no graph knows it
    OpId maker;             // likewise, or it is not known any more
};

// What the program says about one allocation.
struct Owned final {
    enum class Kind : std::uint8_t { buffer, parameter, gradient, state };

    AllocationId allocation;
    Kind kind;
    const void* parameter;  // Python's object for the parameter that it belongs to; null: none
};

// A parameter or a buffer that a module was given inside the budget.
struct ModuleTensor final {
    WeakTensor tensor;
    bool parameter;
};

// Which line of the program runs: the user's innermost one, and that of a library which it called.
struct ProgramLine final {
    std::string file;  // empty: no code of the user's runs
    int number = 0;
    std::string library;
    int number_in_library = 0;
};

struct Snapshot final {
    Bytes memory = 0;
    Nanoseconds clock = 0;
    Bytes resident = 0;  // what the process takes of the machine; 0: the system does not say
    Bytes cached = 0;    // of that, free in the arena
    ProgramLine line;
    std::vector<Holder> holders;
    std::vector<Owned> owned;  // of two that speak of one allocation the later one counts
    bool has_states = false;   // optimizers have said which allocations are their state
};

}  // namespace rekindle
