// Runs an operator that is only counted; see NOTE [Only counting] in memory/only_counting.h.
#pragma once

#include "../memory/driver.h"
#include "../ops/operator_call.h"

namespace rekindle {

// Run an operator of the program and count its results against the budget, but make no recipe.
// Return false, with the operator not run, if it needs more than that: `Operation` must run it.
bool run_counted(Driver& driver, const Facts& facts, OperatorCall& call, Locked& lock);

}  // namespace rekindle
