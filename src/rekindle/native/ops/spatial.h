// Slices of operators on images: convolutions, and upsampling by whole factors.
//
// NOTE [Convolutions in slices]
//
// oneDNN has many kernels for convolutions, and each adds up in its own order. PyTorch uses oneDNN
// only for inputs that are large enough (`at::native::select_conv_backend`), so a slice must be
// large enough as well. oneDNN's direct kernels compute each element in an order that depends on
// nothing else. They exist if the padding is smaller than the filter, and along the last axis at
// most `MOST_PADDING` (oneDNN, `jit_avx2_conv_kernel_f32.cpp`). Otherwise oneDNN multiplies
// matrices, in an order that depends on their sizes and on the number of threads. In random
// convolutions without groups, with 1 to 4 threads, all slices had equal bits if these kernels
// existed, and most had other bits if not. With groups, the order depends on the number of channels
// in a group.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <span>

#include "../base/types.h"
#include "../torch/geometry.h"
#include "slices.h"

namespace rekindle {

// Slices of convolutions are switched off: of 3,300 random programs one, with four threads, had
// other bits in slices than as a whole, and the comparison of pieces did not notice.
inline constexpr bool SLICES_CONVOLUTIONS = false;

// Return which slices of the arguments of `convolution` a slice of its result along `axis` needs;
// none if its bits may be others. `arguments` are the tensors among `given`, all arguments.
std::optional<ArgumentAxes> axes_of_convolution(
    std::span<const Geometry> arguments, std::span<const c10::IValue> given, int axis
);
// The same for `convolution_backward`, which computes the gradient of the input alone.
std::optional<ArgumentAxes> axes_of_gradient(
    std::span<const Geometry> arguments, std::span<const c10::IValue> given, int axis
);
// Note in `found` what slices of the result of either operator need, as `find_stencil` does.
void find_stencil_of_convolution(
    std::span<const Geometry> arguments,
    std::span<const c10::IValue> given,
    bool same_settings,
    Slicing& found
);
// The same for `upsample_nearest2d`.
void find_stencil_of_upsampling(
    const Geometry& argument, std::span<const c10::IValue> given, Slicing& found
);
// Return the memory format of an image or of a filter; none if other strides than usual hide it.
std::optional<at::MemoryFormat> format_of(const Geometry& geometry);
// Return an upper bound of the bytes that oneDNN needs for the arguments of `convolution` and its
// result in its own order. `format` is that of the input.
Bytes workspace_of_convolution(
    std::optional<at::MemoryFormat> format,
    const Geometry& input,
    const Geometry& weight,
    const Geometry& result
);

}  // namespace rekindle
