// PyTorch's meta kernels that are written in C++. PyTorch replaces most of them by Python
// functions, whose first call imports SymPy, which takes half a second, and each call of which
// takes far longer.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace rekindle {

// Return the C++ meta kernel of an operator that programs often call; null for other operators.
const c10::KernelFunction* meta_kernel_of(const c10::OperatorHandle& op);

}  // namespace rekindle
