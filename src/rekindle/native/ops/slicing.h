// Which slice of each argument an operator needs to compute a slice of its results.
//
// NOTE [Operators in slices]
//
// A result that does not fit into the budget is computed slice by slice, each when something reads
// it. A row of a product needs one row of its first factor and all of the second; a column needs
// one column of the second. The rules here hold only if the kernel computes every element in the
// same order, whatever the slice: then the bits are those of the whole. So a sum is never split
// along the axis that it adds up. The first run of each signature in slices is compared with its
// own pieces, and so is each that is shorter or longer than those compared before (`SliceTrials`),
// because a kernel may still choose another order for other sizes.
//
// NOTE [Convolutions have no slices]
//
// oneDNN has many kernels for convolutions. In random convolutions on a processor with AVX2, slices
// had equal bits if a direct kernel (`jit`) computed them. Some had other bits with kernels that
// multiply matrices (`brgconv`, `gemm`): their order also depends on the number of images and of
// threads, and two slices may agree where the whole differs. Scenario: with four threads, oneDNN
// computes the gradient of the input of a convolution with stride 2 by `brgconv_strided`, and one
// image alone gets other bits than among 17 images. PyTorch does not tell which kernel runs, so
// there is no rule for slices.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "../torch/geometry.h"
#include "slices.h"

namespace rekindle {

struct Facts;

// Return true if there are rules for the operator. Every result of such an operator follows from
// its arguments alone.
bool has_slices(const Facts& facts, const c10::OperatorHandle& op);
// A share of the budget: operators that read nothing larger make nothing large.
constexpr std::int64_t SMALL_SHARE = 256;

// Return true if one of `tensors` is so large that slices may help within `budget` bytes.
inline bool is_any_large(std::span<c10::TensorImpl* const> tensors, std::int64_t budget) {
    return std::ranges::any_of(tensors, [&](const c10::TensorImpl* each) {
        return each->numel() * static_cast<std::int64_t>(each->itemsize()) > budget / SMALL_SHARE;
    });
}

// Return which slices of the tensor arguments a slice of the results along `axis` needs; none if
// the operator cannot be sliced along `axis`. `given` are all arguments, with any tensors of the
// right shapes. Of `found`, the results, the joining and the upsampling are known.
std::optional<ArgumentAxes> axes_of_arguments(
    const Facts& facts,
    const c10::OperatorHandle& op,
    std::span<const Geometry> arguments,
    std::span<const c10::IValue> given,
    const Slicing& found,
    int axis
);
// Return how the operator joins its tensor arguments, or pads one with zeros. `arguments` are their
// geometries, `given` are all arguments, and `result` is the geometry of the result.
Joining joining_of(
    const Facts& facts,
    std::span<const Geometry> arguments,
    std::span<const c10::IValue> given,
    const Geometry& result
);
// Return along which axis the operator repeats the positions of its argument. `given` are all
// arguments, and `result` is the geometry of the result.
Upsampling upsampling_of(
    const Facts& facts,
    const Geometry& argument,
    std::span<const c10::IValue> given,
    const Geometry& result
);
// Return true if the kernels of losses accept `geometry` as that of the targets.
bool has_targets(const Geometry& geometry);
// Return true if the operator, when it runs in slices, reads only the shape of its tensor argument
// `index`.
bool reads_only_shape(const Facts& facts, std::size_t index);
// Return which slices along `axis` the operator's kernel computes as it computes the whole, if
// there is only one position on the axes in the mask `fixed`. Products have other kernels for
// threads with few rows or columns. Sums of columns, and softmax of columns, are computed in blocks
// of columns, and what is left over in another way. Kernels of pointwise operators compute whole
// vector registers of elements, and what is left over at the end, and at the end of each thread's
// share, in another way (`Slicing::blockwise`). Return none if slices along `axis` cannot repeat
// that.
std::optional<Grain> grain_of_kernel(
    const Facts& facts,
    const c10::OperatorHandle& op,
    std::span<const Geometry> arguments,
    const Slicing& slicing,
    int axis,
    std::uint32_t fixed
);
// Return true if the operator is pointwise, and not one of those whose result is exact, so that all
// ways to compute it agree. `given` are the arguments.
bool is_blockwise(
    const Facts& facts, const c10::OperatorHandle& op, std::span<const c10::IValue> given
);

}  // namespace rekindle
