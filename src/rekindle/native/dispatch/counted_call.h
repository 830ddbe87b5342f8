// Runs an operator that is only counted; see NOTE [Only counting] in memory/room/only_counting.h.
#pragma once

#include <ATen/core/ivalue.h>

#include <span>

#include "../memory/session.h"
#include "../ops/operator_call.h"

namespace rekindle {

// Count the memory of `tensor`, an argument, unless it is counted already. Return false if the
// operator needs a record of it. written: the operator writes the argument.
bool count_argument(Session& session, Locked& lock, const c10::TensorImpl& tensor, bool written);
// Count the memory that an operator has allocated for `results`. Return its bytes.
Bytes count_results(Session& session, const Facts& facts, std::span<const c10::IValue> results);
// Run an operator of the program and count its results against the budget, but make no recipe.
// Return false, with the operator not run, if it needs more than that: `Operation` must run it.
bool run_counted(Session& session, const Facts& facts, OperatorCall& call, Locked& lock);

}  // namespace rekindle
