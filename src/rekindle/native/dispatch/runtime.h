// Entry point of the core: what PyTorch's dispatcher calls for every operator in a budget.
//
// The rules R1 to R12 are defined in docs/design.md. Code that implements one names it.
#pragma once

#include "../ops/operator_call.h"

namespace rekindle {

// Run `call`, an operator of the program, within the active budget. Outside any budget, pass it on.
void on_operator(OperatorCall& call);

// Register the kernels for Rekindle's dispatch key, which threads inside a budget include. Must be
// called once.
void register_fallback();

}  // namespace rekindle
