// Counts of what runs within the budget now, in all threads of the program.
#pragma once

#include <cstdint>

namespace rekindle {

// How many operators run now, by kind. Scopes change the counts: `Running` (dispatch/running.h) for
// an operator of the program, `Recomputing` (memory/recomputing.h) for a recomputed one, `Effects`
// for one whose side effects are observed. The caller holds the session mutex.
struct InProgress final {
    int operators = 0;          // operators that run now, recomputed ones included
    std::uint64_t started = 0;  // operators started so far
    int recomputations = 0;     // recomputations that run now
    // running operators that may read any memory of the program, not only their operands
    int reading_anything = 0;
    int observed = 0;  // running operators whose side effects are observed (`Effects`)
};

}  // namespace rekindle
