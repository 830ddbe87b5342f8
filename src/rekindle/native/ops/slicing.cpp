#include "slicing.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string_view>
#include <utility>

#include "facts.h"

namespace rekindle {

namespace {

enum class Rule : std::uint8_t {
    none,
    pointwise,
    rows,       // independent along every axis but the one that argument `dim` names
    losses,     // `nll_loss_forward`
    from_loss,  // `nll_loss_backward`
    product,    // `mm`, and `addmm` with a summand first
    products,   // `bmm`, and `baddbmm` with a summand first
    reduction,
    norm,
    embedding,
    gathered,    // `gather`
    joined,      // `cat`, and `slice_backward`, which joins its argument and zeros
    upsampling,  // `upsample_nearest2d`
};

struct Named final {
    std::string_view name;
    Rule rule;
};

constexpr std::array NAMED{
    Named{"aten::_log_softmax", Rule::rows},
    Named{"aten::_log_softmax_backward_data", Rule::rows},
    Named{"aten::_softmax", Rule::rows},
    Named{"aten::_softmax_backward_data", Rule::rows},
    Named{"aten::_to_copy", Rule::pointwise},
    Named{"aten::addmm", Rule::product},
    Named{"aten::amax", Rule::reduction},
    Named{"aten::amin", Rule::reduction},
    Named{"aten::argmax", Rule::reduction},
    Named{"aten::argmin", Rule::reduction},
    Named{"aten::baddbmm", Rule::products},
    Named{"aten::bmm", Rule::products},
    Named{"aten::cat", Rule::joined},
    Named{"aten::clone", Rule::pointwise},
    Named{"aten::embedding", Rule::embedding},
    Named{"aten::gather", Rule::gathered},
    Named{"aten::mean", Rule::reduction},
    Named{"aten::mm", Rule::product},
    Named{"aten::native_layer_norm", Rule::norm},
    Named{"aten::nll_loss_backward", Rule::from_loss},
    Named{"aten::nll_loss_forward", Rule::losses},
    Named{"aten::slice_backward", Rule::joined},
    Named{"aten::sum", Rule::reduction},
    Named{"aten::upsample_nearest2d", Rule::upsampling},
};
static_assert(std::ranges::is_sorted(NAMED, {}, &Named::name));

// Pointwise operators whose results are exact or correctly rounded.
constexpr std::array<std::string_view, 24> EXACT{
    "aten::_to_copy",
    "aten::abs",
    "aten::bitwise_and",
    "aten::bitwise_not",
    "aten::bitwise_or",
    "aten::clamp",
    "aten::clamp_min",
    "aten::clone",
    "aten::div",
    "aten::eq",
    "aten::ge",
    "aten::gt",
    "aten::le",
    "aten::logical_and",
    "aten::logical_not",
    "aten::logical_or",
    "aten::lt",
    "aten::masked_fill",
    "aten::mul",
    "aten::ne",
    "aten::neg",
    "aten::relu",
    "aten::threshold_backward",
    "aten::where",
};
static_assert(std::ranges::is_sorted(EXACT));

Rule named_rule(const Facts& facts) {
    const auto* const found = std::ranges::lower_bound(NAMED, facts.name, {}, &Named::name);
    return found != NAMED.end() && found->name == facts.name ? found->rule : Rule::none;
}

Rule rule_of(const Facts& facts, const c10::OperatorHandle& op) {
    if (!facts.is_aten || facts.writes || facts.random || facts.opaque || facts.dynamic) {
        return Rule::none;
    }
    if (const Rule named = named_rule(facts); named != Rule::none) {
        return named;
    }
    return op.hasTag(at::Tag::pointwise) && facts.returns == 1 ? Rule::pointwise : Rule::none;
}

bool is_counted(const c10::IValue& value) {
    return value.isTensor() && value.toTensor().defined() &&
           !value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

// Return the index, among the tensor arguments, of argument `position`; negative if that argument
// is no tensor.
int index_of(std::span<const c10::IValue> given, std::size_t position) {
    if (position >= given.size() || !is_counted(given[position])) {
        return -1;
    }
    return static_cast<int>(std::count_if(
        given.begin(), given.begin() + static_cast<std::ptrdiff_t>(position), is_counted
    ));
}

// Return the axis of an argument of shape `sizes` that corresponds to `axis` of the result after
// broadcasting; none if they do not fit.
std::optional<int> broadcast_axis(const Geometry& argument, const Geometry& result, int axis) {
    const auto missing =
        static_cast<int>(result.sizes.size()) - static_cast<int>(argument.sizes.size());
    const int own = axis - missing;
    if (own < 0 || argument.sizes[static_cast<std::size_t>(own)] == 1) {
        return UNSLICED;
    }
    const bool same = argument.sizes[static_cast<std::size_t>(own)] ==
                      result.sizes[static_cast<std::size_t>(axis)];
    return same ? std::optional(own) : std::nullopt;
}

// Return the axis that `value`, a dimension as a program writes it, means among `n` axes.
int wrapped(std::int64_t value, std::size_t n) {
    return static_cast<int>(value < 0 ? value + static_cast<std::int64_t>(n) : value);
}

bool is_reduced(const c10::IValue& axes, int axis, std::size_t n) {
    if (axes.isInt()) {
        return wrapped(axes.toInt(), n) == axis;
    }
    return std::ranges::any_of(axes.toIntVector(), [&](std::int64_t each) {
        return wrapped(each, n) == axis;
    });
}

// Return the axis of the input that becomes `axis` of the result of a reduction.
std::optional<int> unreduced_axis(
    std::span<const c10::IValue> given, const Geometry& input, const Geometry& result, int axis
) {
    if (given.size() < 3 || !(given[1].isInt() || given[1].isIntList()) || !given[2].isBool()) {
        return {};
    }
    if (given[1].isIntList() && given[1].toIntVector().empty()) {
        return {};
    }
    const std::size_t n = input.sizes.size();
    const bool kept = result.sizes.size() == n;
    int left = axis;
    for (int each = 0; std::cmp_less(each, n); ++each) {
        const bool reduced = is_reduced(given[1], each, n);
        if (!kept && reduced) {
            continue;
        }
        if (left-- == 0) {
            return reduced ? std::nullopt : std::optional(each);
        }
    }
    return {};
}

// Set the axes of the factors of a product. `first` is the index of the first factor.
void set_factors(ArgumentAxes& axes, int first, int axis, int n) {
    const auto at = static_cast<std::size_t>(first);
    axes[at] = axis == n - 1 ? UNSLICED : axis;
    axes[at + 1] = axis == n - 2 ? UNSLICED : axis;
}

}  // namespace

bool is_blockwise(
    const Facts& facts, const c10::OperatorHandle& op, std::span<const c10::IValue> given
) {
    if (rule_of(facts, op) != Rule::pointwise) {
        return false;
    }
    if (facts.name == "aten::add" || facts.name == "aten::sub") {
        // the kernel may fuse the product with `alpha` into the sum
        return given.size() > 2 && (!given[2].isInt() || given[2].toInt() != 1);
    }
    // Other kernels of these divide or compare in another way at the end of a row.
    const auto is_tensor = [&](std::size_t i) { return i < given.size() && given[i].isTensor(); };
    if ((facts.name == "aten::div" && given.size() > 2) ||
        (facts.name.starts_with("aten::clamp") && (is_tensor(1) || is_tensor(2)))) {
        return true;
    }
    return !std::ranges::binary_search(EXACT, std::string_view(facts.name));
}

namespace {

constexpr std::int64_t BLOCK = 64;  // at least two vector registers of any dtype

// Return which slices along `axis`, with one position on each axis in `fixed`, consist of whole
// blocks of elements, in each thread's share too; none if the whole does not.
std::optional<Grain> grain_of_blocks(
    std::span<const Geometry> arguments,
    const Geometry& whole,
    std::int64_t threads,
    int axis,
    std::uint32_t fixed
) {
    const auto has_order = [&](const Geometry& each) {
        return each.numel() == 1 || (each.sizes == whole.sizes && each.is_contiguous());
    };
    // Other memory orders have other kernels, and those of slices may have another order.
    if (!whole.is_contiguous() || !std::ranges::all_of(arguments, has_order)) {
        return {};
    }
    constexpr std::int64_t share = 32768;  // at::internal::GRAIN_SIZE
    const std::int64_t elements = BLOCK * threads;
    // With fewer elements, not all threads take part.
    const std::int64_t least = threads == 1 ? elements : threads * share;
    const std::int64_t n = whole.numel();
    if (n % elements != 0 || n < least) {
        return {};
    }
    const auto at = static_cast<std::size_t>(axis);
    std::int64_t beside = n / whole.sizes[at];
    for (std::size_t i = 0; i < whole.sizes.size(); ++i) {
        beside /= (fixed >> i & 1U) != 0 ? whole.sizes[i] : 1;
    }
    std::int64_t unit = elements / std::gcd(elements, beside);
    if (whole.strides[at] < BLOCK) {  // positions are not whole rows of elements
        unit = std::lcm(unit, BLOCK);
    }
    if (whole.sizes[at] % unit != 0) {
        return {};
    }
    const std::int64_t positions = (least + beside - 1) / beside;
    return Grain{unit, std::max(unit, (positions + unit - 1) / unit * unit)};
}

bool is_floating(const Geometry& geometry) {
    return c10::isFloatingType(geometry.dtype.toScalarType());
}

// Return which slices consist of whole blocks of columns, if `beside` columns belong to each
// position of the axis.
Grain grain_of_columns(std::int64_t beside) {
    const std::int64_t unit = BLOCK / std::gcd(BLOCK, beside);
    return {unit, std::max<std::int64_t>(unit, 2)};
}

// Threads divide rows and columns of a product among them. A thread with few of them runs other
// kernels, and then the bits depend on how many others there are. In random products, slices had
// equal bits if there were 12 rows and columns or more; with more than two threads, each needed up
// to 14 rows and 41 columns. Of a product with fewer columns, slices of rows had equal bits: with
// one or two threads those of whole blocks, with more threads if the columns were a multiple of 8.
// With double precision, bits differed for all sizes.
std::optional<Grain> grain_of_product(const Slicing& slicing, int axis, std::uint32_t fixed) {
    const Geometry& result = slicing.results[0];
    const auto last = static_cast<int>(result.sizes.size()) - 1;
    if (fixed >> static_cast<unsigned>(last - 1) != 0) {  // a single row or column
        return {};
    }
    const bool few_threads = slicing.threads <= 2;
    const std::int64_t rows = few_threads ? 16 : 16 * slicing.threads;
    const std::int64_t columns = few_threads ? 16 : 64 * slicing.threads;
    if (result.dtype.itemsize() > sizeof(float) || !is_floating(result) ||
        result.sizes[static_cast<std::size_t>(last) - 1] < rows) {
        return {};
    }
    if (result.sizes[static_cast<std::size_t>(last)] < columns) {
        if (last != 1 || axis != 0) {
            return {};
        }
        if (few_threads) {
            return Grain{BLOCK, BLOCK};
        }
        const bool even = result.sizes[1] % 16 == 0;
        return even ? std::optional(Grain{1, rows}) : std::nullopt;
    }
    if (axis == last) {
        return Grain{1, columns};
    }
    return Grain{1, axis == last - 1 ? rows : 1};
}

// Softmax computes vector registers of rows that lie side by side: those on axes after its own.
// If there are any, the threads' shares may end within a register, except with `log_softmax`.
std::optional<Grain> grain_of_rows(
    const Facts& facts, const Slicing& slicing, int axis, std::uint32_t fixed
) {
    const auto& sizes = slicing.results[0].sizes;
    const auto own = std::ranges::find_if(slicing.axes, [](const auto& each) { return !each; });
    if (slicing.threads > 1 && facts.name.starts_with("aten::_softmax") && slicing.axes.back()) {
        return {};
    }
    if (axis <= own - slicing.axes.begin()) {
        return Grain();
    }
    std::int64_t beside = 1;
    for (std::size_t i = static_cast<std::size_t>(axis) + 1; i < sizes.size(); ++i) {
        beside *= sizes[i];
    }
    // Between fixed positions, what is left over is not at the end of the whole.
    if (fixed != 0 && sizes[static_cast<std::size_t>(axis)] * beside % BLOCK != 0) {
        return {};
    }
    return grain_of_columns(beside);
}

// Return false if a reduction sums columns, and these do not lie side by side: columns are
// positions of axes that are not `reduced`, with smaller strides than one that is.
bool has_adjacent_columns(const Geometry& input, const std::vector<bool>& reduced) {
    std::int64_t nearest = 0;   // smallest stride of an axis that is not reduced
    std::int64_t farthest = 0;  // largest stride of an axis that is reduced
    for (std::size_t i = 0; i < reduced.size(); ++i) {
        if (input.sizes[i] == 1) {
            continue;
        }
        if (reduced[i]) {
            farthest = std::max(farthest, input.strides[i]);
        } else {
            nearest = nearest == 0 ? input.strides[i] : std::min(nearest, input.strides[i]);
        }
    }
    return nearest == 1 || farthest <= nearest;
}

// A sum of columns computes blocks of columns, and what is left over in another order. A slice with
// a single position has one axis fewer to the kernel, which may then choose another order. If the
// axis lies within another one, the kernel takes the columns of both as one row of columns, but not
// those of a slice, so that each slice must consist of whole blocks.
std::optional<Grain> grain_of_reduction(const Geometry& input, const Slicing& slicing, int axis) {
    std::vector<bool> reduced(input.sizes.size(), true);
    for (const std::optional<ArgumentAxes>& each : slicing.axes) {
        if (each) {
            reduced[static_cast<std::size_t>((*each)[0])] = false;
        }
    }
    // NOLINTNEXTLINE(bugprone-unchecked-optional-access): the caller has checked the axis
    const auto own = static_cast<std::size_t>((*slicing.axes[static_cast<std::size_t>(axis)])[0]);
    bool is_column = input.strides[own] <= 1;
    bool is_within = false;
    std::int64_t beside = 1;
    for (std::size_t i = 0; i < reduced.size(); ++i) {
        const bool outside = input.strides[i] > input.strides[own] && input.sizes[i] > 1;
        is_column = is_column || (reduced[i] && outside);
        is_within = is_within || (!reduced[i] && outside);
        beside *= reduced[i] || outside || i == own ? 1 : input.sizes[i];
    }
    // Each thread sums a share of the columns. Only if columns lie side by side, shares consist of
    // whole blocks; else what is left over of each share is summed in another order.
    if (slicing.threads > 1 && !has_adjacent_columns(input, reduced)) {
        return {};
    }
    if (!is_column) {
        return Grain{1, 2};
    }
    if (is_within && input.sizes[own] * beside % BLOCK != 0) {
        return {};
    }
    return grain_of_columns(beside);
}

}  // namespace

std::optional<Grain> grain_of_kernel(
    const Facts& facts,
    const c10::OperatorHandle& op,
    std::span<const Geometry> arguments,
    const Slicing& slicing,
    int axis,
    std::uint32_t fixed
) {
    switch (rule_of(facts, op)) {
        case Rule::product:
        case Rule::products:
            return grain_of_product(slicing, axis, fixed);
        case Rule::pointwise:
            return slicing.blockwise
                       ? grain_of_blocks(
                             arguments, slicing.results[0], slicing.threads, axis, fixed
                         )
                       : Grain();
        case Rule::rows:
            return grain_of_rows(facts, slicing, axis, fixed);
        case Rule::reduction:
            return fixed == 0 ? grain_of_reduction(arguments[0], slicing, axis) : std::nullopt;
        case Rule::upsampling:
            return fixed == 0 ? std::optional(Grain()) : std::nullopt;
        default:
            return Grain();
    }
}

bool has_slices(const Facts& facts, const c10::OperatorHandle& op) {
    return rule_of(facts, op) != Rule::none;
}

bool has_targets(const Geometry& geometry) {
    const c10::ScalarType type = geometry.dtype.toScalarType();
    return type == c10::ScalarType::Long || type == c10::ScalarType::Byte;
}

bool reads_only_shape(const Facts& facts, std::size_t index) {
    return facts.name == "aten::_unsafe_view" ||
           (index == 1 && facts.name == "aten::nll_loss_backward");
}

namespace {

using Axes = std::optional<ArgumentAxes>;

// Return true if the operator raises an error for some numbers: whole numbers divided by 0. In
// slices the error would come later, where something reads the result.
bool may_raise(const Facts& facts, const Geometry& result) {
    constexpr std::array<std::string_view, 4> divisions{
        "aten::div", "aten::floor_divide", "aten::fmod", "aten::remainder"
    };
    return !is_floating(result) &&
           std::ranges::find(divisions, std::string_view(facts.name)) != divisions.end();
}

Axes axes_of_pointwise(std::span<const Geometry> arguments, const Geometry& result, int axis) {
    ArgumentAxes axes;
    for (const Geometry& each : arguments) {
        const std::optional<int> own = broadcast_axis(each, result, axis);
        if (!own) {
            return {};
        }
        axes.push_back(*own);
    }
    return axes;
}

// The same for an operator of which only the first argument is sliced.
Axes axes_of_first(std::span<const Geometry> arguments, std::optional<int> own) {
    ArgumentAxes axes(arguments.size(), UNSLICED);
    axes[0] = own.value_or(UNSLICED);
    return own ? Axes(axes) : std::nullopt;
}

Axes axes_of_rows(
    const Facts& facts,
    std::span<const Geometry> arguments,
    std::span<const c10::IValue> given,
    const Geometry& result,
    int axis
) {
    const std::size_t dim = facts.name.ends_with("_data") ? 2 : 1;
    if (!given[dim].isInt() || wrapped(given[dim].toInt(), result.sizes.size()) == axis) {
        return {};
    }
    return ArgumentAxes(arguments.size(), axis);
}

Axes axes_of_loss(Rule rule, std::span<const Geometry> arguments, int axis) {
    ArgumentAxes axes(arguments.size(), UNSLICED);
    const std::size_t scores = rule == Rule::losses ? 0 : 1;
    if (axis != 0 || arguments[scores].sizes.size() != 2 || !has_targets(arguments[scores + 1])) {
        return {};
    }
    axes[scores] = axes[scores + 1] = 0;
    if (rule == Rule::from_loss && !arguments[0].sizes.empty()) {
        axes[0] = 0;
    }
    return axes;
}

Axes axes_of_gathered(
    std::span<const Geometry> arguments, std::span<const c10::IValue> given, int axis
) {
    const std::size_t n = arguments[0].sizes.size();
    const auto at = static_cast<std::size_t>(axis);
    const bool same = n == arguments[1].sizes.size() && given[1].isInt() &&
                      wrapped(given[1].toInt(), n) != axis &&
                      arguments[0].sizes[at] == arguments[1].sizes[at];
    return same ? Axes(ArgumentAxes(2, axis)) : std::nullopt;
}

Axes axes_of_product(std::span<const Geometry> arguments, const Geometry& result, int axis) {
    ArgumentAxes axes(arguments.size(), UNSLICED);
    const int first = static_cast<int>(arguments.size()) - 2;
    set_factors(axes, first, axis, static_cast<int>(result.sizes.size()));
    if (first == 1) {
        const std::optional<int> own = broadcast_axis(arguments[0], result, axis);
        if (!own) {
            return {};
        }
        axes[0] = *own;
    }
    return axes;
}

Axes axes_of_embedding(
    std::span<const Geometry> arguments, std::span<const c10::IValue> given, int axis, int n
) {
    ArgumentAxes axes(arguments.size(), UNSLICED);
    const bool columns = axis == n - 1;
    axes[static_cast<std::size_t>(index_of(given, columns ? 0 : 1))] = columns ? 1 : axis;
    return axes;
}

}  // namespace

namespace {

// Return the place of the argument of `slice_backward` in the result.
Joining joining_with_zeros(std::span<const c10::IValue> given, const Geometry& result) {
    if (given[5].toInt() != 1) {
        return {};
    }
    const int axis = wrapped(given[2].toInt(), result.sizes.size());
    const std::int64_t n = result.sizes[static_cast<std::size_t>(axis)];
    // positions as in `tensor[begin:end]`
    const auto position = [&](std::int64_t value) {
        return std::clamp(value < 0 ? value + n : value, std::int64_t{0}, n);
    };
    const std::int64_t begin = position(given[3].toInt());
    return {axis, {{begin, std::max(position(given[4].toInt()) - begin, std::int64_t{0})}}};
}

// Return the places of the arguments of `cat` in the result.
Joining joining_of_list(
    std::span<const Geometry> arguments, std::span<const c10::IValue> given, const Geometry& result
) {
    // `cat` leaves out arguments of shape (0,)
    const auto fits = [&](const Geometry& each) {
        return each.sizes.size() == result.sizes.size();
    };
    if (!std::ranges::all_of(arguments, fits)) {
        return {};
    }
    Joining found{wrapped(given[1].toInt(), result.sizes.size()), {}};
    std::int64_t begin = 0;
    for (const Geometry& each : arguments) {
        const std::int64_t length = each.sizes[static_cast<std::size_t>(found.axis)];
        found.places.push_back({begin, length});
        begin += length;
    }
    return found;
}

}  // namespace

Joining joining_of(
    const Facts& facts,
    std::span<const Geometry> arguments,
    std::span<const c10::IValue> given,
    const Geometry& result
) {
    if (named_rule(facts) != Rule::joined || !result.is_contiguous()) {
        return {};
    }
    return given[0].isTensor() ? joining_with_zeros(given, result)
                               : joining_of_list(arguments, given, result);
}

Upsampling upsampling_of(
    const Facts& facts,
    const Geometry& argument,
    std::span<const c10::IValue> given,
    const Geometry& result
) {
    if (named_rule(facts) != Rule::upsampling) {
        return {};
    }
    constexpr int rows = 2;
    const std::int64_t size = argument.sizes[rows];
    const std::int64_t factor = result.sizes[rows] / size;
    // With other factors, rounding decides which position is nearest.
    const bool is_exact = factor > 0 && factor * size == result.sizes[rows] &&
                          (factor & (factor - 1)) == 0 &&
                          (given[2].isNone() || given[2].toDouble() == static_cast<double>(factor));
    return is_exact ? Upsampling{rows, size, factor} : Upsampling();
}

std::optional<ArgumentAxes> axes_of_arguments(
    const Facts& facts,
    const c10::OperatorHandle& op,
    std::span<const Geometry> arguments,
    std::span<const c10::IValue> given,
    const Slicing& found,
    int axis
) {
    const Geometry& result = found.results[0];
    const auto is_complex = [](const Geometry& each) {
        return c10::isComplexType(each.dtype.toScalarType());
    };
    if (is_complex(result) || std::ranges::any_of(arguments, is_complex)) {
        return {};  // other kernels, with other results at the ends of rows
    }
    const auto n = static_cast<int>(result.sizes.size());
    switch (const Rule rule = rule_of(facts, op)) {
        case Rule::none:
            return {};
        case Rule::pointwise:
            return may_raise(facts, result) ? std::nullopt
                                            : axes_of_pointwise(arguments, result, axis);
        case Rule::rows:
            return axes_of_rows(facts, arguments, given, result, axis);
        case Rule::losses:
        case Rule::from_loss:
            return axes_of_loss(rule, arguments, axis);
        case Rule::product:
        case Rule::products:
            return axes_of_product(arguments, result, axis);
        case Rule::reduction:
            return axes_of_first(arguments, unreduced_axis(given, arguments[0], result, axis));
        case Rule::norm: {
            const auto normalized = static_cast<int>(given[1].toIntVector().size());
            // The meta kernel gives statistics of lower precisions another dtype than the kernel.
            const bool is_row = axis < n - normalized && result.dtype.itemsize() >= sizeof(float);
            return axes_of_first(arguments, is_row ? std::optional(axis) : std::nullopt);
        }
        case Rule::embedding:
            return axes_of_embedding(arguments, given, axis, n);
        case Rule::gathered:
            return axes_of_gathered(arguments, given, axis);
        case Rule::joined:
            return found.joining.axis == UNSLICED ? std::nullopt
                                                  : Axes(ArgumentAxes(arguments.size(), axis));
        case Rule::upsampling:
            return axis < 2 || axis == found.upsampling.axis ? Axes(ArgumentAxes(1, axis))
                                                             : std::nullopt;
    }
    return {};
}

}  // namespace rekindle
