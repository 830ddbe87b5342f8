#include "plan.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

namespace rekindle {

namespace {

constexpr std::int64_t MOST_REPEATED = 16;    // how often all rows may be computed again
constexpr std::int64_t COMPARED = 16;         // rows with which columns are compared
constexpr Bytes IMPOSSIBLE = UNLIMITED / 64;  // some of them may be added

bool is_last_axis(const Geometry& geometry, int axis) {
    return std::cmp_equal(axis + 1, geometry.sizes.size());
}

// Return true if no axis has a larger stride than one before it.
bool has_sorted_strides(const Geometry& geometry) {
    return std::ranges::is_sorted(geometry.strides, std::greater_equal());
}

// Return true if the elements fill a storage in the order of the axes.
bool is_in_order(const Geometry& geometry) {
    return is_dense(geometry) && has_sorted_strides(geometry);
}

// Return `n` halved until it fits, but not less than `least`.
template <class F>
// NOLINTNEXTLINE(misc-no-recursion): chains of sliced calls are as short as the program's
std::int64_t halved(std::int64_t n, std::int64_t least, F&& fits) {
    while (n > least && !fits(n)) {
        n = std::max(least, n / 2);
    }
    return n;
}

// Return positions 0 on the axes `fixed`.
Box first_of(AxisMask fixed) {
    Box box;
    for (int axis = 0; fixed >> static_cast<unsigned>(axis) != 0; ++axis) {
        if ((fixed & bit(axis)) != 0) {
            box.push_back({axis, 0, 1});
        }
    }
    return box;
}

// Return which slices along `axis` of `view`, a view of the result of `made`, are possible, if
// there is one position only on the axes `fixed`; none if it cannot be sliced.
// NOLINTNEXTLINE(misc-no-recursion): chains of sliced calls are as short as the program's
std::optional<Grain> grain_of_view(
    const SlicedCall& made, const Geometry& view, int axis, AxisMask fixed
) {
    const Geometry& whole = made.result();
    if (view.dtype.itemsize() != whole.dtype.itemsize()) {
        return {};  // a view as another dtype counts other elements
    }
    Box box = first_of(fixed);
    box.push_back({axis, 0, 1});
    const std::optional<Slice> first = slice_of(view, box, whole.numel());
    if (!first) {
        return {};
    }
    const std::int64_t here = view.strides[static_cast<std::size_t>(axis)];
    std::optional<Grain> found;
    AxisMask outer = 0;
    // Where the positions of the view are finer than those of the result's axis, slices may also
    // end between two positions of that axis: the rest is a slice along the next axis inside.
    for (std::optional<int> own = axis_of(whole, first->period); own;) {
        const std::int64_t stride = whole.strides[static_cast<std::size_t>(*own)];
        const AxisPlan plan = axis_plan(made, *own, outer);
        const Grain& grain = plan.grain;
        if (plan.way == SliceWay::none) {
            break;
        }
        const bool ends_within = whole.sizes[static_cast<std::size_t>(*own)] % grain.unit != 0;
        const std::int64_t step = stride * grain.unit;
        if ((outer != 0 && ends_within) || first->begin % step != 0) {
            break;
        }
        const std::int64_t least = stride * grain.least;
        found = Grain{step / std::gcd(step, here), (least + here - 1) / here, grain.repeats};
        if (here % stride == 0) {
            break;
        }
        outer |= bit(*own);
        own = axis_of(whole, stride);
    }
    return found;
}

// NOLINTNEXTLINE(misc-no-recursion): as above
Bytes bytes_of_argument(const SlicedCall& call, std::size_t index, const Box& box) {
    const SlicedArgument& argument = call.arguments[index];
    const Geometry& view = call.signature->geometries[index];
    if (reads_only_shape(call.signature->facts, index)) {
        return 0;
    }
    if (!argument.call) {
        // a kernel may copy a slice that has gaps
        const bool has_gaps = !box.empty() && box.back().axis > 0;
        return has_gaps ? narrowed(view, box).nbytes() : 0;
    }
    return bytes_of_view(*argument.call, view, box);
}

// Return the dtype to which kernels of pointwise operators convert the arguments of `call`.
c10::ScalarType common_dtype(const SlicedCall& call) {
    const c10::ScalarType result = call.result().dtype.toScalarType();
    c10::ScalarType common = c10::ScalarType::Bool;
    for (const Geometry& each : call.signature->geometries) {
        common = c10::promoteTypes(common, each.dtype.toScalarType());
    }
    // Whole numbers may be divided, or compared with a Python number that has a fraction.
    const bool compares = result == c10::ScalarType::Bool && c10::isIntegralType(common, false);
    const bool divides = c10::isFloatingType(result) && !c10::isFloatingType(common);
    return compares || divides ? c10::promoteTypes(common, c10::ScalarType::Float) : common;
}

// Return true if the kernel of `call` converts its arguments to a common type.
bool has_common_dtype(const SlicedCall& call) {
    constexpr std::array<std::string_view, 4> own{
        "aten::_to_copy", "aten::clone", "aten::masked_fill", "aten::where"
    };
    return call.signature->op.hasTag(at::Tag::pointwise) &&
           std::ranges::find(own, std::string_view(call.signature->facts.name)) == own.end();
}

// Return the bytes of the copy that a kernel makes of the positions `box` of its argument: a sum
// first converts the numbers to the type of its result, or to float32, and a pointwise operator to
// a common type. Softmax puts rows into order.
Bytes bytes_copied(const SlicedCall& call, std::size_t index, const Box& box) {
    const Geometry& view = call.signature->geometries[index];
    const c10::ScalarType dtype = view.dtype.toScalarType();
    c10::ScalarType wanted = dtype;
    if (is_called(call, "aten::sum") || is_called(call, "aten::mean")) {
        wanted = call.result().dtype.toScalarType();
        wanted =
            c10::isReducedFloatingType(dtype) ? c10::promoteTypes(wanted, c10::kFloat) : wanted;
    } else if (has_common_dtype(call)) {
        wanted = common_dtype(call);
    }
    const bool orders = call.signature->facts.name.find("softmax") != std::string::npos &&
                        !has_sorted_strides(view);
    return wanted != dtype || orders
               ? narrowed(view, box).numel() * static_cast<Bytes>(c10::elementSize(wanted))
               : 0;
}

// Return the bytes of the sums of all rows, which `log_softmax` of the rows in `box` makes known.
Bytes bytes_of_sums(const SlicedCall& call, const Box& box) {
    const Geometry& whole = call.result();
    if (!is_called(call, "aten::_log_softmax") || box.empty()) {
        return 0;
    }
    constexpr Bytes each_kept = 8;   // largest element and logarithm
    constexpr Bytes each_made = 28;  // and what is made to find them
    const std::int64_t rows = whole.numel() / whole.sizes.back();
    return rows * each_kept + narrowed(whole, box).numel() / whole.sizes.back() * each_made;
}

// Return the bytes for the arguments of `call`, which joins them one after the other, while it
// computes a box of the size of `box`, wherever that is.
// NOLINTNEXTLINE(misc-no-recursion): as above
Bytes bytes_joined(const SlicedCall& call, const Box& box) {
    const Joining& joining = call.slicing().joining;
    Bytes most = 0;
    for (std::size_t i = 0; i < call.arguments.size(); ++i) {
        Box inside = box;
        for (Range& each : inside) {
            if (each.axis == joining.axis) {
                each = {each.axis, 0, std::min(each.length(), joining.places[i].length)};
            }
        }
        most = std::max(most, bytes_of_argument(call, i, inside));
    }
    return most;
}

}  // namespace

std::optional<Range> range_of_argument(
    const SlicedCall& call, std::size_t index, const Range& range
) {
    const Slicing& slicing = call.slicing();
    // NOLINTNEXTLINE(bugprone-unchecked-optional-access): the plan has checked the axis
    const int own = (*slicing.axes[static_cast<std::size_t>(range.axis)])[index];
    if (own == UNSLICED) {
        return {};
    }
    if (slicing.joining.axis == own) {
        const auto [begin, length] = slicing.joining.places[index];
        return Range{
            own,
            std::clamp(range.begin - begin, std::int64_t{0}, length),
            std::clamp(range.end - begin, std::int64_t{0}, length)
        };
    }
    if (const Upsampling& upsampling = slicing.upsampling; upsampling.axis == range.axis) {
        return Range{own, upsampling.begin_of(range.begin), upsampling.end_of(range.end)};
    }
    return Range{own, range.begin, range.end};
}

Box box_of_argument(const SlicedCall& call, std::size_t index, const Box& box) {
    Box made;
    for (const Range& range : box) {
        if (const std::optional<Range> own = range_of_argument(call, index, range)) {
            made.push_back(*own);
        }
    }
    return made;
}

AxisMask outer_axes(const Box& box) {
    AxisMask mask = 0;
    for (std::size_t i = 0; i + 1 < box.size(); ++i) {
        mask |= bit(box[i].axis);
    }
    return mask;
}

// NOLINTNEXTLINE(misc-no-recursion): as above
Box widened(const SlicedCall& call, const Box& box) {
    if (box.empty() || way_of(call, box) != SliceWay::by_kernel) {
        return box;
    }
    Box made = box;
    Range& last = made.back();
    const std::int64_t n = call.result().sizes[static_cast<std::size_t>(last.axis)];
    const Grain grain = axis_plan(call, last.axis, outer_axes(box)).grain;
    if (last.length() < grain.least) {
        last.begin = std::max(std::int64_t{0}, std::min(last.begin, n - grain.least));
        last.end = std::max(last.end, last.begin + grain.least);
    }
    last.begin -= last.begin % grain.unit;
    last.end = std::min(n, (last.end + grain.unit - 1) / grain.unit * grain.unit);
    return made;
}

// NOLINTNEXTLINE(misc-no-recursion): as above
bool is_possible(const SlicedCall& call, const Box& box) {
    if (box.empty()) {
        return true;
    }
    const Range& last = box.back();
    const AxisPlan plan = axis_plan(call, last.axis, outer_axes(box));
    const std::int64_t n = call.result().sizes[static_cast<std::size_t>(last.axis)];
    const std::int64_t unit = plan.grain.unit;
    return plan.way != SliceWay::none && last.begin % unit == 0 &&
           (last.end % unit == 0 || last.end == n);
}

std::optional<Grain> kernel_grain(const SlicedCall& call, int axis, AxisMask fixed) {
    const Signature& signature = *call.signature;
    return grain_of_kernel(
        signature.facts, signature.op, signature.geometries, call.slicing(), axis, fixed
    );
}

Geometry rows_of(const SlicedCall& call, int axis) {
    Geometry made = call.result();
    std::int64_t width = 1;
    for (auto i = static_cast<std::size_t>(axis); i < made.sizes.size(); ++i) {
        width *= made.sizes[i];
    }
    const std::int64_t rows = made.numel() / width;
    made.sizes = {rows, width};
    made.strides = {width, 1};
    return made;
}

// NOLINTNEXTLINE(misc-no-recursion): as above
std::optional<Grain> grain_of_rows(const SlicedCall& call, int axis) {
    return grain_of_view(call, rows_of(call, axis), 0, 0);
}

// NOLINTNEXTLINE(misc-no-recursion): as above
SliceWay way_of(const SlicedCall& call, const Box& box) {
    return box.size() == 1 ? axis_plan(call, box[0].axis).way : SliceWay::by_kernel;
}

namespace {

std::atomic<std::int64_t> failed_trials = 0;

// Return true if argument `index` of `call` is all of the result of another call, in its own order.
bool is_whole_result(const SlicedCall& call, std::size_t index) {
    const SlicedCallPtr& made = call.arguments[index].call;
    const Geometry& view = call.signature->geometries[index];
    return made && view.offset == 0 && view.sizes == made->result().sizes &&
           view.strides == made->result().strides;
}

// Return true if there is a way to compute columns of the result, of which `axis` is the last axis,
// from the sums of the rows.
// NOLINTNEXTLINE(misc-no-recursion): as above
bool has_columns(const SlicedCall& call, int axis) {
    const Signature& signature = *call.signature;
    const Geometry& whole = call.result();
    if (!is_last_axis(whole, axis) || whole.sizes.size() < 2 || !is_in_order(whole) ||
        rows_of(call, axis).sizes[0] < 2 ||  // a single row is the whole result
        whole.dtype != caffe2::TypeMeta::Make<float>()) {
        return false;
    }
    if (is_called(call, "aten::_log_softmax")) {
        return !call.slicing().axes.back() && grain_of_rows(call, axis).has_value();
    }
    if (whole.sizes.size() != 2) {
        return false;
    }
    if (is_called(call, "aten::nll_loss_backward")) {
        // no weights of the classes
        return signature.geometries.size() == 4 && has_targets(signature.geometries[2]);
    }
    return is_called(call, "aten::_log_softmax_backward_data") && !call.slicing().axes.back() &&
           is_whole_result(call, 0) && is_whole_result(call, 1) &&
           is_called(*call.arguments[0].call, "aten::nll_loss_backward") &&
           axis_plan(*call.arguments[0].call, 1).way == SliceWay::columns &&
           axis_plan(*call.arguments[1].call, 1).way == SliceWay::columns;
}

}  // namespace

// NOLINTNEXTLINE(misc-no-recursion): as above
std::int64_t rows_to_compare(const SlicedCall& call, int axis) {
    const Grain grain = grain_of_rows(call, axis).value_or(Grain());
    const std::int64_t wanted = std::max(COMPARED, grain.least);
    return std::min(
        rows_of(call, axis).sizes[0], (wanted + grain.unit - 1) / grain.unit * grain.unit
    );
}

namespace {

// Return true if each result has as many positions along the axis `at` as the first one, and the
// operator can be sliced along the axes `fixed`.
bool all_have_axis(const SlicedCall& call, std::size_t at, AxisMask fixed) {
    const Slicing& slicing = call.slicing();
    return std::ranges::all_of(
               first_of(fixed),
               [&](const Range& other) {
                   return slicing.axes[static_cast<std::size_t>(other.axis)].has_value();
               }
           ) &&
           std::ranges::all_of(slicing.results, [&](const Geometry& each) {
               return at < each.sizes.size() && each.sizes[at] == slicing.results[0].sizes[at];
           });
}

// Return which slices along `axis` the kernel, or the way to compute columns, allows; none if none.
// NOLINTNEXTLINE(misc-no-recursion): as above
std::optional<Grain> direct_grain(const SlicedCall& call, int axis, AxisMask fixed, bool columns) {
    const auto at = static_cast<std::size_t>(axis);
    const auto& axes = call.slicing().axes;
    const std::int64_t n = call.result().sizes[at];
    if (!all_have_axis(call, at, fixed)) {
        return {};
    }
    // Slices differ by half at most, and a trial compares a slice with its pieces.
    const std::optional<Grain> kernel = columns ? Grain() : kernel_grain(call, axis, fixed);
    if (!kernel) {
        return {};
    }
    Grain grain = *kernel;
    grain.least = std::min(n, grain.least == 1 ? 1 : 2 * grain.least);
    for (std::size_t i = 0; i < call.arguments.size(); ++i) {
        if (!call.arguments[i].call || reads_only_shape(call.signature->facts, i)) {
            continue;
        }
        // NOLINTNEXTLINE(bugprone-unchecked-optional-access): the kernel has slices along the axis
        const int own = columns ? axis : (*axes[at])[i];
        if (own == UNSLICED) {
            return {};
        }
        AxisMask beside = 0;
        for (const Range& other : box_of_argument(call, i, first_of(fixed))) {
            beside |= bit(other.axis);
        }
        const std::optional<Grain> other =
            grain_of_view(*call.arguments[i].call, call.signature->geometries[i], own, beside);
        if (other && call.slicing().upsampling.axis == axis) {
            // It is computed from other positions, and from more than these if necessary.
            grain.repeats = grain.repeats || other->repeats;
            continue;
        }
        const Joining& joining = call.slicing().joining;
        if (!other || (joining.axis == axis && joining.places[i].begin % other->unit != 0)) {
            return {};
        }
        grain.unit = std::lcm(grain.unit, other->unit);
        grain.repeats = grain.repeats || other->repeats;
        grain.least = std::min(n, std::max(grain.least, other->least));
    }
    return grain;
}

// NOLINTNEXTLINE(misc-no-recursion): as above
AxisPlan new_axis_plan(const SlicedCall& call, int axis, AxisMask fixed) {
    const bool refused = call.slicing().trials.have_failed(bit(axis) | fixed);
    const bool sliced = call.slicing().axes[static_cast<std::size_t>(axis)].has_value();
    const bool columns = !sliced && fixed == 0 && has_columns(call, axis);
    if (!refused && (sliced || columns)) {
        if (const std::optional<Grain> grain = direct_grain(call, axis, fixed, columns)) {
            return {columns ? SliceWay::columns : SliceWay::by_kernel, *grain};
        }
    }
    if (fixed != 0 || !is_in_order(call.result()) || rows_of(call, axis).sizes[0] < 2) {
        return {};
    }
    const std::optional<Grain> rows = grain_of_rows(call, axis);
    if (!rows || rows->repeats) {
        return {};
    }
    const std::int64_t n = call.result().sizes[static_cast<std::size_t>(axis)];
    return {SliceWay::through_rows, {1, (n + MOST_REPEATED - 1) / MOST_REPEATED, true}};
}

}  // namespace

void note_failed_trial() noexcept {
    ++failed_trials;
}

// NOLINTNEXTLINE(misc-no-recursion): as above
AxisPlan axis_plan(const SlicedCall& call, int axis, AxisMask fixed) {
    const std::int64_t failed = failed_trials;
    AxisPlans& known = call.axes;
    {
        const std::scoped_lock lock(slices_mutex);
        if (known.failed_trials != failed) {
            known = {failed, {}};
        }
        for (const AxisPlans::Entry& each : known.entries) {
            if (each.axis == axis && each.fixed == fixed) {
                return each.plan;
            }
        }
    }
    const AxisPlan found = new_axis_plan(call, axis, fixed);
    const std::scoped_lock lock(slices_mutex);
    if (known.failed_trials == failed) {
        known.entries.push_back({axis, fixed, found});
    }
    return found;
}

// NOLINTNEXTLINE(misc-no-recursion): as above
Bytes bytes_of_view(const SlicedCall& call, const Geometry& view, const Box& box) {
    const Geometry& whole = call.result();
    const std::optional<Slice> slice = slice_of(view, box, whole.numel());
    const std::vector<Box> boxes = slice ? boxes_of(whole, *slice) : std::vector<Box>();
    if (boxes.empty()) {
        return IMPOSSIBLE;
    }
    Bytes most = 0;
    bool in_pieces = boxes.size() > 1;
    // the boxes between the second and the last are as large as the second
    for (std::size_t i = 0; i < boxes.size(); ++i) {
        if (i < 2 || i + 1 == boxes.size()) {
            const Box box_there = widened(call, boxes[i]);
            if (!is_possible(call, box_there)) {
                return IMPOSSIBLE;
            }
            in_pieces = in_pieces || box_there.size() > 1 ||
                        (!box_there.empty() && box_there[0].length() > boxes[i][0].length());
            most = std::max(most, bytes_of(call, box_there));
        }
    }
    if (in_pieces) {
        // NOLINTNEXTLINE(bugprone-unchecked-optional-access): else there were no boxes
        most += whole.nbytes() / slice->period * slice->width();
    }
    return std::min(most, IMPOSSIBLE);
}

std::int64_t tried_pieces(const SlicedCall& call, const Box& box) {
    constexpr std::int64_t most = 4;
    if (box.empty() || call.slicing().joining.axis != UNSLICED ||
        call.slicing().trials.is_tried(box.back().axis, box.back().length())) {
        return 0;
    }
    const Grain grain = kernel_grain(call, box.back().axis, outer_axes(box)).value_or(Grain());
    const std::int64_t least = (grain.least + grain.unit - 1) / grain.unit * grain.unit;
    return std::min(most, box.back().length() / least);
}

std::int64_t piece_length(const SlicedCall& call, const Box& box, std::int64_t pieces) {
    const Range& range = box.back();
    const Grain grain = kernel_grain(call, range.axis, outer_axes(box)).value_or(Grain());
    const std::int64_t most = (range.length() + pieces - 1) / pieces;
    return (most + grain.unit - 1) / grain.unit * grain.unit;
}

// NOLINTNEXTLINE(misc-no-recursion): as above
std::int64_t rows_at_once(const SlicedCall& call, int axis, Bytes most) {
    const Geometry rows = rows_of(call, axis);
    // NOLINTNEXTLINE(misc-no-recursion): as above
    return halved(rows.sizes[0], rows_to_compare(call, axis), [&](std::int64_t length) {
        return bytes_of_view(call, rows, {{0, 0, length}}) <= most;
    });
}

namespace {

// Return the bytes of the copies that a trial of the slice `box` makes of its arguments: pieces of
// a pointwise operator's arguments have no gaps either.
Bytes bytes_of_piece(const SlicedCall& call, const Box& box, std::int64_t pieces) {
    if (!call.slicing().blockwise || box.back().axis == 0) {
        return 0;
    }
    Box piece = box;
    piece.back() = {box.back().axis, 0, piece_length(call, box, pieces)};
    Bytes total = 0;
    for (std::size_t i = 0; i < call.arguments.size(); ++i) {
        const Geometry& view = call.signature->geometries[i];
        total +=
            view.is_contiguous() ? narrowed(view, box_of_argument(call, i, piece)).nbytes() : 0;
    }
    return total;
}

// Return how many positions of the result are computed along the last axis of `box`, and cut off.
std::int64_t positions_cut(const SlicedCall& call, const Box& box) {
    const Upsampling& upsampling = call.slicing().upsampling;
    if (box.empty() || box.back().axis != upsampling.axis) {
        return 0;
    }
    const std::int64_t length = box.back().length();
    return upsampling.factor * upsampling.most_needed(length) - length;
}

// Return the positions of argument `index` that a box of the size of `box` needs, wherever it is:
// those of which most have to be computed.
// NOLINTNEXTLINE(misc-no-recursion): as above
Box widest_box_of_argument(const SlicedCall& call, std::size_t index, const Box& box) {
    Box made = box_of_argument(call, index, box);
    const Upsampling& upsampling = call.slicing().upsampling;
    if (box.empty() || box.back().axis != upsampling.axis) {
        return made;
    }
    Range& last = made.back();
    std::int64_t unit = 1;
    if (const SlicedCallPtr& argument = call.arguments[index].call) {
        const Geometry& view = call.signature->geometries[index];
        unit = grain_of_view(*argument, view, last.axis, 0).value_or(Grain()).unit;
    }
    const std::int64_t length = upsampling.most_needed(box.back().length());
    last.begin = std::min(unit - 1, upsampling.size - length);
    last.end = last.begin + length;
    return made;
}

// Return the bytes that the kernel needs for itself.
// NOLINTNEXTLINE(misc-no-recursion): as above
Bytes bytes_inside(const SlicedCall& call, const Box& box) {
    if (!is_called(call, "aten::upsample_nearest2d")) {
        return 0;
    }
    Geometry result = narrowed(call.result(), box);
    if (!box.empty()) {
        result.sizes[static_cast<std::size_t>(box.back().axis)] += positions_cut(call, box);
    }
    const Box inside = widest_box_of_argument(call, 0, box);
    // both with the channels side by side
    return narrowed(call.signature->geometries[0], inside).nbytes() + result.nbytes();
}

}  // namespace

// NOLINTNEXTLINE(misc-no-recursion): as above
Bytes bytes_of(const SlicedCall& call, const Box& box) {
    const SliceWay way = way_of(call, box);
    if (way == SliceWay::through_rows) {
        const int axis = box[0].axis;
        const Bytes cut = narrowed(call.result(), box).nbytes();
        return cut +
               bytes_of_view(call, rows_of(call, axis), {{0, 0, rows_at_once(call, axis, cut)}});
    }
    const bool columns = way == SliceWay::columns;
    const int axis = box.empty() ? UNSLICED : box.back().axis;
    const std::int64_t cut = positions_cut(call, box);
    Bytes total = 0;
    for (const Geometry& result : call.slicing().results) {
        const bool has_axes = std::ranges::all_of(box, [&](const Range& each) {
            return std::cmp_less(each.axis, result.sizes.size());
        });
        total += has_axes ? narrowed(result, box).nbytes() : result.nbytes();
    }
    if (cut != 0) {
        total += total / box.back().length() * (box.back().length() + cut);
    }
    if (columns) {
        total *= 5;
    } else if (const std::int64_t pieces = tried_pieces(call, box); pieces > 1) {
        total += 2 * total / pieces + bytes_of_piece(call, box, pieces);
    }
    total += columns ? 0 : bytes_of_sums(call, box);
    if (call.slicing().joining.axis != UNSLICED) {
        return total + bytes_joined(call, box);
    }
    for (std::size_t i = 0; i < call.arguments.size(); ++i) {
        if (!columns) {
            const Box inside = widest_box_of_argument(call, i, box);
            total += bytes_of_argument(call, i, inside) + bytes_copied(call, i, inside);
        } else if (call.arguments[i].call) {
            total += bytes_of_argument(call, i, box);
        }
    }
    total += bytes_inside(call, box);
    if (columns && !reads_only_shape(call.signature->facts, 1)) {
        // the sums of the rows are found first, row by row
        total = std::max(
            total, bytes_of_view(call, rows_of(call, axis), {{0, 0, rows_to_compare(call, axis)}})
        );
    }
    return total;
}

namespace {

// Return how many positions along `axis` fit into `available` bytes, at least one unit.
std::int64_t length_within(
    const SlicedCall& call, int axis, std::int64_t n, const Grain& grain, Bytes available
) {
    const std::int64_t unit = grain.unit;
    std::int64_t low = std::max<std::int64_t>(1, (grain.least + unit - 1) / unit);
    std::int64_t high = (n + unit - 1) / unit;
    const auto length = [&](std::int64_t units) { return std::min(n, units * unit); };
    high = std::max(low, high);
    while (low < high) {
        const std::int64_t middle = (low + high + 1) / 2;
        if (bytes_of(call, {{axis, 0, length(middle)}}) <= available) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return length(low);
}

bool gathers(const SlicedCall& call) {
    const Signature& signature = *call.signature;
    return is_called(call, "aten::nll_loss_forward") && signature.geometries.size() == 2 &&
           has_targets(signature.geometries[1]) && signature.geometries[0].sizes.size() == 2 &&
           call.result().sizes.empty();
}

// Return the plan along `axis` with the largest slices that need at most `available` bytes, or with
// the smallest slices; none if there are no slices along it.
std::optional<SlicePlan> plan_along(const SlicedCall& call, int axis, Bytes available) {
    SlicePlan plan;
    plan.axis = axis;
    if (axis == SlicePlan::GATHERED) {
        const Geometry& losses = call.signature->geometries[0];
        const std::optional<Grain> grain =
            call.arguments[0].call ? grain_of_view(*call.arguments[0].call, losses, 0, 0) : Grain();
        if (!grain) {
            return {};
        }
        const std::int64_t n = losses.sizes[0];
        plan.unit = grain->unit;
        const auto bytes = [&](std::int64_t length) {
            return bytes_of_argument(call, 0, {{0, 0, length}}) + 32 * n;
        };
        const std::int64_t least = std::max(grain->unit, grain->least);
        plan.length =
            halved(n, least, [&](std::int64_t length) { return bytes(length) <= available; });
        plan.workspace = bytes(plan.length);
        return plan.workspace < IMPOSSIBLE ? std::optional(plan) : std::nullopt;
    }
    const AxisPlan along = axis_plan(call, axis);
    if (along.way == SliceWay::none) {
        return {};
    }
    const std::int64_t n = call.result().sizes[static_cast<std::size_t>(axis)];
    plan.unit = along.grain.unit;
    plan.repeats = along.grain.repeats;
    plan.length = length_within(call, axis, n, along.grain, available);
    plan.workspace = bytes_of(call, {{axis, 0, plan.length}});
    return plan.workspace < IMPOSSIBLE ? std::optional(plan) : std::nullopt;
}

// Call `visit(plan)` for each way to run `call` in slices.
template <class F>
void each_plan(const SlicedCall& call, Bytes available, F&& visit) {
    if (gathers(call)) {
        if (const auto plan = plan_along(call, SlicePlan::GATHERED, available)) {
            visit(*plan);
        }
        return;
    }
    for (std::size_t i = 0; i < call.slicing().axes.size(); ++i) {
        if (call.result().sizes[i] > 1) {
            if (const auto plan = plan_along(call, static_cast<int>(i), available)) {
                visit(*plan);
            }
        }
    }
}

// Return what `plan` costs, as a multiple of computing the whole. Each slice has a price, because
// it takes several small kernels.
double cost_of(const SlicedCall& call, const SlicePlan& plan) {
    constexpr double each_slice = 0.02;
    const auto slices = static_cast<double>(slices_of(call, plan));
    return (plan.repeats ? slices : 1) + each_slice * slices;
}

}  // namespace

std::int64_t slices_of(const SlicedCall& call, const SlicePlan& plan) {
    const std::int64_t n = plan.axis == SlicePlan::GATHERED
                               ? call.signature->geometries[0].sizes[0]
                               : call.result().sizes[static_cast<std::size_t>(plan.axis)];
    return (n + plan.length - 1) / plan.length;
}

std::optional<SlicePlan> plan_of(const SlicedCall& call, Bytes available) {
    std::optional<SlicePlan> best;
    each_plan(call, available, [&](const SlicePlan& plan) {
        const bool fits = plan.workspace <= available;
        const bool best_fits = best && best->workspace <= available;
        const bool better = !best || (fits && !best_fits) ||
                            (fits == best_fits && (fits ? cost_of(call, plan) < cost_of(call, *best)
                                                        : plan.workspace < best->workspace));
        if (better) {
            best = plan;
        }
    });
    return best;
}

Bytes useful_workspace(const SlicedCall& call) {
    Bytes most = 0;
    each_plan(call, UNLIMITED / 2, [&](const SlicePlan& plan) {
        most = std::max(most, plan.workspace);
    });
    return most;
}

}  // namespace rekindle
