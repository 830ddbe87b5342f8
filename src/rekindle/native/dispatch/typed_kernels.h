// Kernels of the operators that training steps call most often, for Rekindle's dispatch key. They
// get the arguments as C++ values; see NOTE [Boxed and typed calls] in ops/operator_call.h.
#pragma once

namespace rekindle {

// Register the kernels. Must be called once.
void register_typed_kernels();

}  // namespace rekindle
