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
//
// NOTE [Gradients in turn]
//
// `convolution_backward` computes the gradients of the weight and of the input one after the other,
// each by kernels of its own. So it gives the same bits if it is called once for the weight, and
// then once for the input. The second call reads only the shape of the input, and can run in slices
// (ops/spatial.h). Scenario: the gradient of an image, the image and its own gradient are larger
// than the budget; any two of them fit.
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

// Compute the gradients of an operator that has no room as a whole in turn, each by a call of
// `run`, and put the results on the stack of `call`. Return false, with the operator not run, if
// that is impossible. Releases the session mutex while `run` runs.
bool run_gradients_in_turn(
    const Session& session,
    const Facts& facts,
    OperatorCall& call,
    Locked& lock,
    c10::function_ref<void(OperatorCall&)> run
);

}  // namespace rekindle
