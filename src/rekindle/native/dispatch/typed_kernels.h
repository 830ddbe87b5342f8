// Kernels of the operators that training steps call most often, for Rekindle's dispatch key. They
// get the arguments as C++ values; see NOTE [Boxed and typed calls] in ops/operator_call.h.
#pragma once

#include <torch/library.h>

namespace rekindle {

// Register the kernels in `aten`, the library of PyTorch's operators at Rekindle's dispatch key.
// Must be called once.
void register_typed_kernels(torch::Library& aten);

}  // namespace rekindle
