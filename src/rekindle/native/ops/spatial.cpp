#include "spatial.h"

#include <ATen/native/ConvUtils.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstddef>
#include <ranges>
#include <utility>
#include <vector>

namespace rekindle {

namespace {

constexpr int BATCH = 0;
constexpr int CHANNELS = 1;
constexpr int ROWS = 2;  // the first axis of an image, if there are several
constexpr std::int64_t MOST_PADDING = 3;
constexpr std::int64_t CHANNEL_BLOCK = 16;  // a vector register with 512 bits

bool has_strides(const Geometry& geometry, const std::vector<std::int64_t>& strides) {
    return std::ranges::equal(geometry.strides, strides);
}

std::vector<std::int64_t> strides_in_order(const Geometry& geometry) {
    std::vector<std::int64_t> strides(geometry.sizes.size(), 1);
    for (std::size_t i = strides.size(); i-- > 1;) {
        strides[i - 1] = strides[i] * geometry.sizes[i];
    }
    return strides;
}

// Return the strides that an image has if its channels lie side by side; none for a tensor that is
// no image.
std::vector<std::int64_t> strides_of_channels_last(const Geometry& geometry) {
    switch (geometry.sizes.size()) {
        case 4:
            return c10::get_channels_last_strides_2d(geometry.sizes);
        case 5:
            return c10::get_channels_last_strides_3d(geometry.sizes);
        default:
            return {};
    }
}

constexpr std::size_t STRIDE = 3;  // position of the stride among the arguments of `convolution`
constexpr std::size_t STRIDE_BACKWARD = 4;  // and of `convolution_backward`

// The arguments of `convolution` that are no tensors.
struct Parameters final {
    // They begin at position `first` of the arguments `given`.
    Parameters(std::span<const c10::IValue> given, std::size_t first)
        : stride(given[first].toIntVector()),
          padding(given[first + 1].toIntVector()),
          dilation(given[first + 2].toIntVector()),
          transposed(given[first + 3].toBool()),
          output_padding(given[first + 4].toIntVector()),
          groups(given[first + 5].toInt()) {}

    std::vector<std::int64_t> stride;
    std::vector<std::int64_t> padding;
    std::vector<std::int64_t> dilation;
    bool transposed;
    std::vector<std::int64_t> output_padding;
    std::int64_t groups;
};

// Return over how many positions along the axis `i` of an image the filter reaches.
std::int64_t reach_of(const Geometry& weight, const Parameters& parameters, std::size_t i) {
    return parameters.dilation[i] * (weight.sizes[i + 2] - 1) + 1;
}

// Return true if a direct kernel computes the convolution, if PyTorch leaves it to oneDNN.
// `arguments` are the input, the filter, and any others.
bool is_direct(std::span<const Geometry> arguments, const Parameters& parameters) {
    if (!SLICES_CONVOLUTIONS) {
        return false;
    }
    const Geometry& input = arguments[0];
    const Geometry& weight = arguments[1];
    if (input.sizes.size() < 3 || weight.sizes.size() != input.sizes.size()) {
        return false;
    }
    const std::size_t n = input.sizes.size() - 2;
    const auto is_float = [](const Geometry& each) {
        return each.dtype == caffe2::TypeMeta::Make<float>();
    };
    if (parameters.transposed || parameters.stride.size() != n || parameters.padding.size() != n ||
        parameters.dilation.size() != n || !std::ranges::all_of(arguments, is_float)) {
        return false;
    }
    for (std::size_t i = 0; i < n; ++i) {
        if (parameters.padding[i] >= reach_of(weight, parameters, i)) {
            return false;
        }
    }
    const std::int64_t channels = input.sizes[CHANNELS];
    const bool by_channel = parameters.groups == channels && weight.sizes[0] == channels &&
                            channels % CHANNEL_BLOCK == 0;
    const std::optional<at::MemoryFormat> format = format_of(input);
    return parameters.padding.back() <= MOST_PADDING && (parameters.groups == 1 || by_channel) &&
           format && (format != at::MemoryFormat::Contiguous || format_of(weight) == format);
}

// Return the kernels to which PyTorch leaves the convolution of `arguments`, if these have only
// `length` positions along `axes`.
at::native::ConvBackend backend_of(
    std::span<const Geometry> arguments,
    const Parameters& parameters,
    const ArgumentAxes& axes,
    std::int64_t length
) {
    std::vector<at::Tensor> tensors;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        std::vector<std::int64_t> sizes(arguments[i].sizes.begin(), arguments[i].sizes.end());
        if (axes[i] != UNSLICED) {
            std::int64_t& size = sizes[static_cast<std::size_t>(axes[i])];
            size = std::min(size, length);
        }
        tensors.push_back(at::empty({1}, at::TensorOptions(arguments[i].dtype)).expand(sizes));
    }
    const auto symbolic = [](const std::vector<std::int64_t>& numbers) {
        return std::vector<c10::SymInt>(numbers.begin(), numbers.end());
    };
    const bool has_bias = tensors.size() > 2;
    return at::native::select_conv_backend(
        tensors[0],
        tensors[1],
        has_bias ? std::optional(tensors[2]) : std::nullopt,
        symbolic(parameters.stride),
        symbolic(parameters.padding),
        symbolic(parameters.dilation),
        parameters.transposed,
        symbolic(parameters.output_padding),
        parameters.groups,
        std::nullopt
    );
}

}  // namespace

std::optional<at::MemoryFormat> format_of(const Geometry& geometry) {
    if (has_strides(geometry, strides_in_order(geometry))) {
        return at::MemoryFormat::Contiguous;
    }
    const bool is_last = geometry.sizes.size() > CHANNELS && geometry.sizes[CHANNELS] > 1 &&
                         has_strides(geometry, strides_of_channels_last(geometry));
    if (!is_last) {
        return {};
    }
    return geometry.sizes.size() == 4 ? at::MemoryFormat::ChannelsLast
                                      : at::MemoryFormat::ChannelsLast3d;
}

std::optional<ArgumentAxes> axes_of_convolution(
    std::span<const Geometry> arguments, std::span<const c10::IValue> given, int axis
) {
    const Parameters parameters(given, STRIDE);
    if (!is_direct(arguments, parameters)) {
        return {};
    }
    ArgumentAxes axes(arguments.size(), UNSLICED);
    if (axis == BATCH || (axis == ROWS && arguments[0].sizes.size() > 3)) {
        axes[0] = axis;
        return axes;
    }
    if (axis != CHANNELS || parameters.groups != 1) {
        return {};
    }
    std::fill(axes.begin() + 1, axes.end(), 0);
    return axes;
}

std::optional<ArgumentAxes> axes_of_gradient(
    std::span<const Geometry> arguments, std::span<const c10::IValue> given, int axis
) {
    const Parameters parameters(given, STRIDE_BACKWARD);
    const c10::List<bool> mask = given.back().toBoolList();
    const bool is_slice = mask[0] && !mask[1] && !mask[2] && arguments[1].sizes.size() > 3 &&
                          parameters.groups == 1 && is_direct(arguments.subspan(1), parameters) &&
                          (axis == BATCH || (axis == ROWS && parameters.stride[0] == 1));
    return is_slice ? std::optional(ArgumentAxes{axis, UNSLICED, UNSLICED}) : std::nullopt;
}

void find_stencil_of_convolution(
    std::span<const Geometry> arguments,
    std::span<const c10::IValue> given,
    bool same_settings,
    Slicing& found
) {
    Geometry& result = found.results[0];
    if (std::ranges::none_of(found.axes, [](const auto& each) { return each.has_value(); })) {
        return;
    }
    const bool backward = given.back().isBoolList();
    const auto tensors = backward ? arguments.subspan(1) : arguments;
    const Parameters parameters(given, backward ? STRIDE_BACKWARD : STRIDE);
    const Geometry& input = tensors[0];
    // meta kernels do not know them
    const std::vector<std::int64_t> strides = format_of(input) == at::MemoryFormat::Contiguous
                                                  ? strides_in_order(result)
                                                  : strides_of_channels_last(result);
    result.strides.assign(strides.begin(), strides.end());
    if (input.sizes.size() > 3) {
        const std::int64_t reach = reach_of(tensors[1], parameters, 0);
        const std::int64_t padding = parameters.padding[0];
        found.stencil = {
            ROWS,
            arguments[0].sizes[ROWS],
            parameters.stride[0],
            backward ? reach - 1 - padding : padding,
            reach
        };
    }
    found.least.assign(result.sizes.size(), 0);
    ArgumentAxes axes(tensors.size(), UNSLICED);
    constexpr auto wanted = at::native::ConvBackend::Mkldnn;
    if (!same_settings || backend_of(tensors, parameters, axes, 0) != wanted) {
        return;
    }
    for (std::size_t axis = 0; axis < found.axes.size(); ++axis) {
        if (!found.axes[axis]) {
            continue;
        }
        // At both ends of the axis, slices need the fewest positions of the input; a gradient has
        // the input's positions.
        axes[0] = axis == CHANNELS ? UNSLICED : static_cast<int>(axis);
        const auto suffices = [&](std::int64_t length) {
            if (axis == ROWS && !backward) {
                length = found.stencil.end_of(length);
            }
            return backend_of(tensors, parameters, axes, length) == wanted;
        };
        const auto lengths = std::views::iota(std::int64_t{1}, result.sizes[axis]);
        found.least[axis] = *std::ranges::partition_point(lengths, std::not_fn(suffices));
    }
}

void find_stencil_of_upsampling(
    const Geometry& argument, std::span<const c10::IValue> given, Slicing& found
) {
    const std::int64_t rows = argument.sizes[ROWS];
    const std::int64_t factor = found.results[0].sizes[ROWS] / rows;
    // With other factors, rounding decides which position is nearest.
    const bool is_exact = factor * rows == found.results[0].sizes[ROWS] &&
                          (factor & (factor - 1)) == 0 &&
                          (given[2].isNone() || given[2].toDouble() == static_cast<double>(factor));
    if (is_exact) {
        found.stencil = {ROWS, rows, 1, 0, 1, factor};
    }
}

Bytes workspace_of_convolution(
    std::optional<at::MemoryFormat> format,
    const Geometry& input,
    const Geometry& weight,
    const Geometry& result
) {
    const auto padded = [](const Geometry& each, int axis) {
        const std::int64_t n = each.sizes[static_cast<std::size_t>(axis)];
        return each.numel() / n * ((n + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK * CHANNEL_BLOCK);
    };
    constexpr std::int64_t few = 4;  // of fewer channels, there is no other order
    std::int64_t total = padded(weight, 0) / weight.sizes[1] *
                         ((weight.sizes[1] + CHANNEL_BLOCK - 1) / CHANNEL_BLOCK * CHANNEL_BLOCK);
    if (format != at::MemoryFormat::Contiguous) {
        return total * static_cast<Bytes>(sizeof(float));
    }
    total += padded(result, CHANNELS);
    total += input.sizes[CHANNELS] < few ? 0 : padded(input, CHANNELS);
    return total * static_cast<Bytes>(sizeof(float));
}

}  // namespace rekindle
