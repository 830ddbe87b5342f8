#include "plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace rekindle {

namespace {

constexpr std::int64_t MOST_REPEATED = 16;  // how often all rows may be computed again
constexpr std::int64_t COMPARED = 16;       // rows with which columns are compared

bool is_last_axis(const Geometry& geometry, int axis) {
    return std::cmp_equal(axis + 1, geometry.sizes.size());
}

// Return which slices along `axis` of argument `index` are possible; none if it cannot be sliced.
std::optional<Grain> grain_of_argument(const SlicedCall& call, std::size_t index, int axis) {
    const SlicedCall& made = *call.arguments[index].call;
    const Geometry& view = call.signature->geometries[index];
    const std::optional<Slice> first = slice_of(view, {axis, 0, 1}, made.result().numel());
    if (!first) {
        return {};
    }
    const Geometry& whole = made.result();
    const std::int64_t here = view.strides[static_cast<std::size_t>(axis)];
    for (std::size_t i = 0; i < whole.sizes.size(); ++i) {
        if (whole.sizes[i] <= 1 || whole.strides[i] * whole.sizes[i] != first->period) {
            continue;
        }
        const std::optional<Grain> own = grain_of(made, static_cast<int>(i));
        if (!own) {
            return {};
        }
        const std::int64_t step = whole.strides[i] * own->unit;
        if (first->begin % step != 0) {
            return {};
        }
        const std::int64_t least = whole.strides[i] * own->least;
        return Grain{step / std::gcd(step, here), (least + here - 1) / here, own->repeats};
    }
    return {};
}

Bytes bytes_of_argument(const SlicedCall& call, std::size_t index, const Range& range) {
    const SlicedArgument& argument = call.arguments[index];
    const Geometry& view = call.signature->geometries[index];
    if (reads_only_shape(call.signature->facts, index)) {
        return 0;
    }
    if (!argument.call) {
        // a kernel may copy a slice that has gaps
        return range.axis > 0 ? narrowed(view, range).nbytes() : 0;
    }
    const Geometry& whole = argument.call->result();
    const Slice slice =
        range.axis < 0 ? Slice::whole(whole.numel()) : *slice_of(view, range, whole.numel());
    const std::optional<Range> own = range_of(whole, slice);
    return own ? bytes_of(*argument.call, *own) : UNLIMITED / 4;
}

}  // namespace

std::optional<Grain> kernel_grain(const SlicedCall& call, int axis) {
    const Signature& signature = *call.signature;
    return grain_of_kernel(
        signature.facts, signature.op, signature.geometries, call.slicing(), axis
    );
}

bool goes_through_rows(const SlicedCall& call, int axis) {
    return axis > 0 && !call.slicing().axes[static_cast<std::size_t>(axis)] &&
           call.slicing().axes[0] && is_dense(call.result()) && !has_columns(call, axis);
}

// NOLINTNEXTLINE(misc-no-recursion): chains of sliced calls are as short as the program's
bool has_columns(const SlicedCall& call, int axis) {
    const Signature& signature = *call.signature;
    const Geometry& whole = call.result();
    if (!is_last_axis(whole, axis) || whole.sizes.size() < 2 || !is_dense(whole) ||
        whole.strides.back() != 1 || whole.dtype != caffe2::TypeMeta::Make<float>()) {
        return false;
    }
    if (is_called(call, "aten::_log_softmax")) {
        return !call.slicing().axes.back() && grain_of(call, 0).has_value();
    }
    if (whole.sizes.size() != 2) {
        return false;
    }
    if (is_called(call, "aten::nll_loss_backward")) {
        return signature.geometries.size() == 4;  // no weights of the classes
    }
    return is_called(call, "aten::_log_softmax_backward_data") && !call.slicing().axes.back() &&
           call.arguments[0].call && call.arguments[1].call &&
           is_called(*call.arguments[0].call, "aten::nll_loss_backward") &&
           has_columns(*call.arguments[0].call, 1) && has_columns(*call.arguments[1].call, 1);
}

std::int64_t rows_to_compare(const SlicedCall& call) {
    const Grain grain = grain_of(call, 0).value_or(Grain());
    const std::int64_t wanted = std::max(COMPARED, grain.least);
    return std::min(call.result().sizes[0], (wanted + grain.unit - 1) / grain.unit * grain.unit);
}

// NOLINTNEXTLINE(misc-no-recursion): chains of sliced calls are as short as the program's
std::optional<Grain> grain_of(const SlicedCall& call, int axis) {
    const auto at = static_cast<std::size_t>(axis);
    if ((call.slicing().trials.unequal >> at & 1U) != 0) {
        return {};
    }
    const bool special = !call.slicing().axes[at];
    if (goes_through_rows(call, axis)) {
        return grain_of(call, 0) ? std::optional(Grain{1, 1, true}) : std::nullopt;
    }
    if (special && !has_columns(call, axis)) {
        return {};
    }
    for (const Geometry& each : call.slicing().results) {
        if (at >= each.sizes.size() || each.sizes[at] != call.result().sizes[at]) {
            return {};
        }
    }
    const std::int64_t n = call.result().sizes[at];
    // Blocks differ by half at most, and a trial compares a block with its halves.
    const std::optional<Grain> kernel = special ? Grain() : kernel_grain(call, axis);
    if (!kernel) {
        return {};
    }
    Grain grain = *kernel;
    grain.least = std::min(n, 2 * grain.least);
    for (std::size_t i = 0; i < call.arguments.size(); ++i) {
        if (!call.arguments[i].call || reads_only_shape(call.signature->facts, i)) {
            continue;
        }
        const int own = special ? axis : (*call.slicing().axes[at])[i];
        if (own == UNSLICED) {
            return {};
        }
        const std::optional<Grain> other = grain_of_argument(call, i, own);
        if (!other) {
            return {};
        }
        grain.unit = std::lcm(grain.unit, other->unit);
        grain.repeats = grain.repeats || other->repeats;
        grain.least = std::min(n, std::max(grain.least, other->least));
    }
    return grain;
}

// NOLINTNEXTLINE(misc-no-recursion): as above
Bytes bytes_of(const SlicedCall& call, const Range& range) {
    if (range.axis >= 0 && goes_through_rows(call, range.axis)) {
        return narrowed(call.result(), range).nbytes() +
               bytes_of(call, {0, 0, rows_to_compare(call)});
    }
    const bool special =
        range.axis >= 0 && !call.slicing().axes[static_cast<std::size_t>(range.axis)];
    Bytes total = 0;
    const bool tried = range.axis < 0 || (call.slicing().trials.equal >> range.axis & 1U) != 0;
    for (const Geometry& result : call.slicing().results) {
        const bool has_axis = range.axis >= 0 && std::cmp_less(range.axis, result.sizes.size());
        total += has_axis ? narrowed(result, range).nbytes() : result.nbytes();
    }
    total *= (tried ? 1 : 2) + (special ? 3 : 0);
    for (std::size_t i = 0; i < call.arguments.size(); ++i) {
        const int own = special ? range.axis
                        : range.axis < 0
                            ? UNSLICED
                            : (*call.slicing().axes[static_cast<std::size_t>(range.axis)])[i];
        const bool follows = !special || call.arguments[i].call;
        if (follows) {
            total += bytes_of_argument(call, i, {own, range.begin, range.end});
        }
    }
    if (special && !reads_only_shape(call.signature->facts, 1)) {
        // the sums of the rows are found first, row by row
        total = std::max(total, bytes_of(call, {0, 0, rows_to_compare(call)}));
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
        if (bytes_of(call, {axis, 0, length(middle)}) <= available) {
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
           signature.geometries[0].sizes.size() == 2 && call.result().sizes.empty();
}

// Return the argument of `call` that the plan's axis slices, with its unit, or the call itself.
std::optional<SlicePlan> plan_along(const SlicedCall& call, int axis, Bytes available) {
    SlicePlan plan;
    plan.axis = axis;
    if (axis == SlicePlan::GATHERED) {
        const Geometry& losses = call.signature->geometries[0];
        const std::optional<Grain> grain =
            call.arguments[0].call ? grain_of_argument(call, 0, 0) : Grain();
        if (!grain) {
            return {};
        }
        const std::int64_t n = losses.sizes[0];
        plan.length = n;
        plan.unit = grain->unit;
        const auto bytes = [&](std::int64_t length) {
            return bytes_of_argument(call, 0, {0, 0, length}) + 32 * n;
        };
        const std::int64_t least = std::max(grain->unit, grain->least);
        while (plan.length > least && bytes(plan.length) > available) {
            plan.length = std::max(least, plan.length / 2);
        }
        plan.workspace = bytes(plan.length);
        return plan;
    }
    const std::optional<Grain> grain = grain_of(call, axis);
    if (!grain) {
        return {};
    }
    const std::int64_t n = call.result().sizes[static_cast<std::size_t>(axis)];
    plan.unit = grain->unit;
    plan.length = length_within(call, axis, n, *grain, available);
    plan.workspace = bytes_of(call, {axis, 0, plan.length});
    if (grain->repeats && plan.length < n / MOST_REPEATED) {
        return {};
    }
    return plan;
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

// Return the share of `call` that one slice of `plan` computes.
double share_of(const SlicedCall& call, const SlicePlan& plan) {
    const std::int64_t n = plan.axis == SlicePlan::GATHERED
                               ? call.signature->geometries[0].sizes[0]
                               : call.result().sizes[static_cast<std::size_t>(plan.axis)];
    return static_cast<double>(plan.length) / static_cast<double>(n);
}

}  // namespace

std::optional<SlicePlan> plan_of(const SlicedCall& call, Bytes available) {
    std::optional<SlicePlan> best;
    each_plan(call, available, [&](const SlicePlan& plan) {
        const bool fits = plan.workspace <= available;
        const bool best_fits = best && best->workspace <= available;
        const bool better =
            !best || (fits && !best_fits) ||
            (fits == best_fits && (fits ? share_of(call, plan) > share_of(call, *best)
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
