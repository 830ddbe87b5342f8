// Operators that do not fit as a whole, and run as several calls instead.
//
// NOTE [Operators on lists in parts]
//
// An operator on lists (`_foreach_add_`, `_fused_adam_`) does the same with each tensor of a list,
// so it gives the same bits if it runs over one part of the list after the other. Each part is an
// operator call of its own, which restores its operands and makes room for its results. Scenario:
// an optimizer with `fused=True` needs all parameters, gradients and states at once, and they
// exceed the budget. Parts are used only while sources may be moved to the host: otherwise all
// operands stay in memory anyway.
#pragma once

#include <c10/util/FunctionRef.h>

#include "../memory/session.h"
#include "../ops/operator_call.h"

namespace rekindle {

// If the operator works on lists whose tensors would take more than half of the budget, run it over
// parts of the lists, each by a call of `run`, and put the results on the stack of `call`. Return
// false, with the operator not run, if it should run as a whole. Releases the session mutex while
// parts run.
bool run_list_in_parts(
    Session& session,
    const Facts& facts,
    OperatorCall& call,
    Locked& lock,
    c10::function_ref<void(OperatorCall&)> run
);

}  // namespace rekindle
