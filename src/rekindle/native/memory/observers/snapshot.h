// A snapshot of the storages in memory, as numbers only: cheap enough to take at every new peak.
//
// Python turns snapshots into text for reports (rekindle.pytorch.native._snapshots).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../../base/types.h"
#include "../../torch/storage_ptr.h"

namespace rekindle {

// Number of one allocation of memory. A write to the memory does not change the number, and neither
// does giving its storage a record. Memory allocated later at the same address has another number.
using AllocationId = std::int64_t;

// One storage in memory, with the facts that reports show about it.
struct Holder final {
    static constexpr int REPLAYABLE = 1;
    static constexpr int PINNED = 2;
    static constexpr int HELD = 4;        // variables of the program refer to the storage
    static constexpr int REFERENCED = 8;  // autograd saved the value
    static constexpr int CONSUMED = 16;   // recipes of other values read the value
    static constexpr int PARAMETER = 32;
    static constexpr int COUNTED = 64;     // the storage has no record: only its bytes count
    static constexpr int UNPACKED = 128;   // only the backward node that runs holds the storage
    static constexpr int NAMED = 256;      // a Python object refers to a tensor of the storage
    static constexpr int UNNAMED = 512;    // only C++ code refers to the storage's tensor
    static constexpr int BACKWARD = 1024;  // made since the running backward pass began

    Bytes nbytes;
    AllocationId allocation;
    int flags;
    const char* site;  // name of the operator that made the storage
    // Python object of the parameter that has this storage; null if no parameter has it.
    const void* parameter;
    StorageId storage;  // id in the engine; negative: the storage has no record
    OpId maker;         // id of the call that made it; negative if it is unknown
};

// The role of one allocation of memory in the program's model, such as parameter or optimizer
// state.
struct Owned final {
    enum class Kind : std::uint8_t { buffer, parameter, gradient, state };

    AllocationId allocation;
    Kind kind;
    // Python object of the parameter to which a gradient or an optimizer state belongs; null for
    // others.
    const void* parameter;
};

// Source line of the program that runs now: the innermost line of user code, and the line in the
// library that it called.
struct ProgramLine final {
    std::string file;  // empty: no user code runs
    int number = 0;
    std::string library;
    int number_in_library = 0;
};

struct Snapshot final {
    Bytes memory = 0;
    Nanoseconds clock = 0;
    // Resident set size of the process; 0 if the system does not report it.
    Bytes resident = 0;
    // part of `resident` that Rekindle's allocator (the arena) keeps free for later allocations
    Bytes cached = 0;
    ProgramLine line;
    std::vector<Holder> holders;
    // Roles of allocations in the program's model. A later entry replaces an earlier one for the
    // same allocation.
    std::vector<Owned> owned;
    bool has_states = false;  // optimizers have reported their state
};

}  // namespace rekindle
