// The backward of a convolution, of which not all gradients fit at once.
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

// If the operator computes several gradients that would take a large share of the budget, compute
// them in turn, each by a call of `run`, and put the results on the stack of `call`. Return false,
// with the operator not run, if it should run as a whole. Releases the session mutex while `run`
// runs.
bool run_gradients_in_turn(
    Session& session,
    const Facts& facts,
    OperatorCall& call,
    Locked& lock,
    c10::function_ref<void(OperatorCall&)> run
);

}  // namespace rekindle
