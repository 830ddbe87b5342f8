#include "evaluation.h"

#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/nll_loss_backward.h>
#include <ATen/ops/nll_loss_forward.h>
#include <ATen/ops/upsample_nearest2d.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "../../base/clock.h"
#include "../../ops/call_again.h"
#include "../../torch/replay_dispatch_guard.h"

namespace rekindle {

namespace {

constexpr std::int64_t IGNORED = -100;  // target of rows without a loss

// Return `tensor` as integers of the same size, in the same memory.
at::Tensor bits_of(const at::Tensor& tensor) {
    switch (tensor.element_size()) {
        case 1:
            return tensor.view(at::kByte);
        case 2:
            return tensor.view(at::kShort);
        case 4:
            return tensor.view(at::kInt);
        case 8:
            return tensor.view(at::kLong);
        default:
            return at::view_as_real(tensor).view(at::kLong);
    }
}

bool has_equal_bits(const at::Tensor& one, const at::Tensor& other) {
    return one.dtype() == other.dtype() && at::equal(bits_of(one), bits_of(other));
}

SliceTrials& trials_of(const SlicedCall& call) {
    // NOLINTNEXTLINE(bugprone-unchecked-optional-access): a sliced call has it
    return call.signature->slicing->trials;
}

[[noreturn]] void refuse(const SlicedCall& call, int axis) {
    trials_of(call).failed(bit(axis));
    note_failed_trial();
    throw UnequalSlices();
}

// Slice no call with the signature of `call` any more.
[[noreturn]] void refuse_all(const SlicedCall& call) {
    trials_of(call).failed(~AxisMask{0});
    note_failed_trial();
    throw UnequalSlices();
}

// Call `visit(begin, end)` for blocks that cover `n` positions, with at most `length` positions
// each, in multiples of `unit`. The blocks are about equally long: kernels treat the rest of a
// product in their own way if it is a single row.
template <class F>
// NOLINTNEXTLINE(misc-no-recursion): chains of sliced calls are as short as the program's
void each_block(std::int64_t n, std::int64_t length, std::int64_t unit, F&& visit) {
    const std::int64_t units = (n + unit - 1) / unit;
    const std::int64_t most = std::max<std::int64_t>(1, length / unit);
    const std::int64_t blocks = (units + most - 1) / most;
    for (std::int64_t i = 0; i < blocks; ++i) {
        visit(units * i / blocks * unit, std::min(n, units * (i + 1) / blocks * unit));
    }
}

c10::IValue constant(const SlicedCall& call, std::size_t position) {
    std::vector<at::Tensor> tensors;
    for (const Geometry& each : call.signature->geometries) {
        tensors.push_back(at::empty({0}, at::TensorOptions().dtype(each.dtype)));
    }
    torch::jit::Stack stack;
    call.signature->arguments(stack, tensors, call.unkeyed_args);
    return stack[position];
}

// Return `part`, a slice of argument `index` of `call`, without gaps if the argument has none:
// kernels of pointwise operators (GELU's, for one) compute memory with gaps in another way.
at::Tensor without_gaps(const SlicedCall& call, std::size_t index, const at::Tensor& part) {
    const bool whole =
        call.slicing().blockwise && call.signature->geometries[index].is_contiguous();
    return whole ? part.contiguous() : part;
}

// Return `targets` of a loss over `classes` in 64 bits, with `IGNORED` for rows that have no loss:
// those whose target is `ignored`. Raise the kernel's error for other targets that are no class.
at::Tensor usual_targets(const at::Tensor& targets, std::int64_t ignored, std::int64_t classes) {
    const at::Tensor wide = targets.to(at::kLong);
    const at::Tensor without = wide.eq(ignored);
    const at::Tensor wrong =
        wide.lt(0).logical_or_(wide.ge(classes)).logical_and_(without.logical_not());
    if (wrong.any().item<bool>()) {
        const auto target = wide.masked_select(wrong)[0].item<std::int64_t>();
        TORCH_CHECK_INDEX(false, "Target ", target, " is out of bounds.");
    }
    return at::where(without, IGNORED, wide);
}

}  // namespace

// Return the positions `box` of the results of `call`, given what these need of the arguments.
std::vector<at::Tensor> Evaluation::run_kernel(
    const SlicedCall& call, const Box& box, std::vector<at::Tensor> arguments
) {
    const Upsampling& upsampling = call.slicing().upsampling;
    if (box.empty() || box.back().axis != upsampling.axis) {
        return run_kernel(call, std::move(arguments));
    }
    const std::optional<double> scale = constant(call, 2).toOptional<double>();
    if (scale && *scale != static_cast<double>(upsampling.factor)) {
        refuse_all(call);  // the factor of another call with this signature, for the same sizes
    }
    const Range& range = box.back();
    const at::Tensor made = at::upsample_nearest2d(
        arguments[0],
        {upsampling.factor * arguments[0].size(upsampling.axis), call.result().sizes.back()},
        scale,
        constant(call, 3).toOptional<double>()
    );
    return {made.narrow(upsampling.axis, range.begin % upsampling.factor, range.length())};
}

std::vector<at::Tensor> Evaluation::run_kernel(
    const SlicedCall& call, std::vector<at::Tensor> arguments
) {
    const torch::jit::Stack stack = call_again(
        *call.signature,
        arguments,
        call.unkeyed_args,
        {},
        call.grad_mode,
        [](c10::function_ref<void()> kernel) { kernel(); }
    );
    std::vector<at::Tensor> results;
    each_tensor(stack, [&](std::uint32_t, const at::Tensor& tensor) { results.push_back(tensor); });
    return results;
}

// NOLINTNEXTLINE(misc-no-recursion): chains of sliced calls are as short as the program's
std::vector<at::Tensor> Evaluation::run(const SlicedCall& call, const Box& box) {
    const Nanoseconds began = now_ns();
    const Nanoseconds before = std::exchange(inside_, 0);
    std::vector<at::Tensor> results = compute(call, box);
    for (std::size_t i = 0; i < results.size(); ++i) {
        if (results[i].dtype() != call.slicing().results[i].dtype) {
            refuse_all(
                call
            );  // the meta kernel, from which the geometry is, differs from the kernel
        }
    }
    const Nanoseconds elapsed = now_ns() - began;
    {
        const std::scoped_lock lock(slices_mutex);
        call.time.spent += std::max<Nanoseconds>(0, elapsed - inside_);
        call.time.elements += results[0].numel();
    }
    inside_ = before + elapsed;
    return results;
}

// NOLINTNEXTLINE(misc-no-recursion): as above
std::vector<at::Tensor> Evaluation::compute(const SlicedCall& call, const Box& box) {
    const ReplayDispatchGuard guard(false);
    const SliceWay way = way_of(call, box);
    if (way == SliceWay::columns || way == SliceWay::through_rows) {
        return {way == SliceWay::columns ? columns(call, box[0]) : columns_of_rows(call, box[0])};
    }
    if (call.slicing().joining.axis != UNSLICED) {
        return {joined(call, box)};
    }
    std::vector<at::Tensor> arguments;
    for (std::size_t i = 0; i < call.arguments.size(); ++i) {
        const at::Tensor part = argument(call, i, box_of_argument(call, i, box));
        arguments.push_back(without_gaps(call, i, part));
    }
    std::vector<at::Tensor> results = run_kernel(call, box, arguments);
    if (!box.empty()) {
        try_pieces(call, box, arguments, results);
    }
    if (is_called(call, "aten::_log_softmax")) {
        note_rows(call, box, arguments[0], results[0]);
    }
    return results;
}

// Return the positions `box` of the result of `call`, which joins its arguments.
// NOLINTNEXTLINE(misc-no-recursion): as above
at::Tensor Evaluation::joined(const SlicedCall& call, const Box& box) {
    const Geometry& result = call.result();
    const Joining& joining = call.slicing().joining;
    const auto options = at::TensorOptions().dtype(result.dtype);
    const auto sizes = narrowed(result, box).sizes;
    at::Tensor made = joining.fills(result) ? at::empty(sizes, options) : at::zeros(sizes, options);
    const auto* const along = std::ranges::find(box, joining.axis, &Range::axis);
    const std::int64_t first = along == box.end() ? 0 : along->begin;
    for (std::size_t i = 0; i < call.arguments.size(); ++i) {
        const Box inside = box_of_argument(call, i, box);
        if (std::ranges::any_of(inside, [](const Range& each) { return each.length() == 0; })) {
            continue;
        }
        const at::Tensor part = argument(call, i, inside);
        const std::int64_t begin = std::max(joining.places[i].begin - first, std::int64_t{0});
        made.narrow(joining.axis, begin, part.size(joining.axis)).copy_(part);
    }
    return made;
}

// NOLINTNEXTLINE(misc-no-recursion): as above
at::Tensor Evaluation::argument(const SlicedCall& call, std::size_t index, const Box& box) {
    const Geometry& view = call.signature->geometries[index];
    const SlicedArgument& source = call.arguments[index];
    const Geometry part = narrowed(view, box);
    if (reads_only_shape(call.signature->facts, index)) {
        return at::zeros({1}, at::TensorOptions().dtype(view.dtype)).expand(part.sizes);
    }
    if (!source.call) {
        return part.in(leaf_(*source.leaf));
    }
    const std::optional<Slice> wanted = slice_of(view, box, source.call->result().numel());
    if (!wanted) {  // the last position ends beyond a period, as in `y[::3]`
        refuse_all(*source.call);
    }
    const at::Tensor made = slice(*source.call, *wanted);
    if (box.empty()) {
        return part.in(storage_of(*made.unsafeGetTensorImpl()));  // maybe a view as another dtype
    }
    return compacted(part, *wanted).in(storage_of(*made.unsafeGetTensorImpl()));
}

// Return the slice `wanted` of the result of `call`, alone in its storage.
// NOLINTNEXTLINE(misc-no-recursion): as above
at::Tensor Evaluation::slice(const SlicedCall& call, const Slice& wanted) {
    const Geometry& whole = call.result();
    const std::vector<Box> boxes = boxes_of(whole, wanted);
    if (boxes.empty()) {
        refuse_all(call);
    }
    at::Tensor all;
    for (const Box& box : boxes) {
        const Box computed = widened(call, box);
        if (!is_possible(call, computed)) {
            refuse_all(call);
        }
        at::Tensor made = run(call, computed)[0];
        if (!box.empty()) {
            const Range& last = box.back();
            made = made.narrow(last.axis, last.begin - computed.back().begin, last.length());
        }
        const Geometry here = compacted(narrowed(whole, box), wanted);
        const bool alone = boxes.size() == 1 && made.storage_offset() == 0 &&
                           made.sizes() == here.sizes && made.strides() == here.strides &&
                           std::cmp_equal(made.storage().nbytes(), here.nbytes());
        if (alone) {
            return made;
        }
        if (!all.defined()) {
            all = at::empty({whole.numel() / wanted.period * wanted.width()}, made.options());
        }
        here.in(storage_of(*all.unsafeGetTensorImpl())).copy_(made);
    }
    return all;
}

// Return the rows `begin` to `end` of the result of `call`, whose columns begin at `axis`.
// NOLINTNEXTLINE(misc-no-recursion): as above
at::Tensor Evaluation::rows(
    const SlicedCall& call, int axis, std::int64_t begin, std::int64_t end
) {
    const std::int64_t width = rows_of(call, axis).sizes[1];
    const at::Tensor made = slice(call, {call.result().numel(), begin * width, end * width});
    Geometry here = rows_of(call, axis);
    here.sizes[0] = end - begin;
    return here.in(storage_of(*made.unsafeGetTensorImpl()));
}

// -- trials ---------------------------------------------------------------------------------------

// Compute a slice once more in pieces, and compare the bits.
void Evaluation::try_pieces(
    const SlicedCall& call,
    const Box& box,
    std::span<const at::Tensor> arguments,
    std::span<const at::Tensor> results
) {
    const Range& range = box.back();
    const std::int64_t pieces = tried_pieces(call, box);
    if (pieces < 2) {
        return;
    }
    const std::int64_t n = range.length();
    const Grain grain = kernel_grain(call, range.axis, outer_axes(box)).value_or(Grain());
    std::int64_t shortest = n;
    each_block(
        n, piece_length(call, box, pieces), grain.unit, [&](std::int64_t begin, std::int64_t end) {
            shortest = std::min(shortest, end - begin);
            const Range piece{range.axis, range.begin + begin, range.begin + end};
            std::vector<at::Tensor> parts;
            for (std::size_t i = 0; i < arguments.size(); ++i) {
                at::Tensor part = arguments[i];
                if (const std::optional<Range> own = range_of_argument(call, i, piece)) {
                    const std::int64_t before = range_of_argument(call, i, range)->begin;
                    part = part.narrow(own->axis, own->begin - before, own->length());
                }
                parts.push_back(without_gaps(call, i, part));
            }
            const std::vector<at::Tensor> again = run_kernel(call, {piece}, std::move(parts));
            for (std::size_t i = 0; i < again.size(); ++i) {
                const bool has_axis =
                    range.axis < results[i].dim() && results[i].size(range.axis) == n;
                if (has_axis &&
                    !has_equal_bits(results[i].narrow(range.axis, begin, end - begin), again[i])) {
                    refuse(call, range.axis);
                }
            }
        }
    );
    trials_of(call).passed(range.axis, shortest, n);
}

// Compare columns with the same elements in a slice of rows, which the operator's kernel computes.
// NOLINTNEXTLINE(misc-no-recursion): as above
void Evaluation::compare_with_rows(
    const SlicedCall& call, const Range& range, const at::Tensor& found
) {
    if (trials_of(call).is_tried(range.axis, range.length())) {
        return;
    }
    // The first, the middle and the last rows: many rows of a loss may be ignored.
    const std::int64_t n = rows_to_compare(call, range.axis);
    const std::int64_t all = rows_of(call, range.axis).sizes[0];
    const std::int64_t unit = grain_of_rows(call, range.axis).value_or(Grain()).unit;
    for (const std::int64_t place : {std::int64_t{0}, (all - n) / 2, all - n}) {
        const std::int64_t begin = place / unit * unit;
        const std::int64_t end = std::min(all, begin + n);
        const at::Tensor some =
            rows(call, range.axis, begin, end).narrow(1, range.begin, range.length());
        const at::Tensor here = found.reshape({-1, range.length()}).narrow(0, begin, end - begin);
        if (!has_equal_bits(some, here)) {
            refuse(call, range.axis);
        }
    }
    trials_of(call).passed(range.axis, range.length(), range.length());
}

// -- columns --------------------------------------------------------------------------------------

// NOLINTNEXTLINE(misc-no-recursion): as above
at::Tensor Evaluation::columns(const SlicedCall& call, const Range& range) {
    const std::int64_t n = range.length();
    if (is_called(call, "aten::_log_softmax")) {
        return columns_of_log_softmax(call, range);
    }
    if (is_called(call, "aten::nll_loss_backward")) {
        at::Tensor found = columns_from_loss(call, range).narrow(1, 0, n).contiguous();
        compare_with_rows(call, range, found);
        return found;
    }
    // The gradient of a row has one element that is not zero, which is the sum of the row. If it is
    // not among the columns, it is in the additional one.
    const at::Tensor gradient = columns_from_loss(*call.arguments[0].call, range);
    at::Tensor output;
    {
        const at::Tensor some = argument(call, 1, {range});
        output = at::cat({some, at::full({some.size(0), 1}, -1, some.options())}, 1);
    }
    at::Tensor found = at::_log_softmax_backward_data(gradient, output, 1, gradient.scalar_type())
                           .narrow(1, 0, n)
                           .contiguous();
    compare_with_rows(call, range, found);
    return found;
}

// Compute all rows, some at once, and keep the positions `range` of each.
// NOLINTNEXTLINE(misc-no-recursion): as above
at::Tensor Evaluation::columns_of_rows(const SlicedCall& call, const Range& range) {
    const Geometry& whole = call.result();
    const std::int64_t n = rows_of(call, range.axis).sizes[0];
    const std::int64_t inside = whole.strides[static_cast<std::size_t>(range.axis)];
    at::Tensor found;
    each_block(
        n,
        rows_at_once(call, range.axis, narrowed(whole, {range}).nbytes()),
        grain_of_rows(call, range.axis).value_or(Grain()).unit,
        // NOLINTNEXTLINE(misc-no-recursion): as above
        [&](std::int64_t begin, std::int64_t end) {
            const at::Tensor some = rows(call, range.axis, begin, end)
                                        .narrow(1, range.begin * inside, range.length() * inside);
            if (!found.defined()) {
                found = at::empty({n, range.length() * inside}, some.options());
            }
            found.narrow(0, begin, end - begin).copy_(some);
        }
    );
    return found.view(narrowed(whole, {range}).sizes);
}

// NOLINTNEXTLINE(misc-no-recursion): as above
at::Tensor Evaluation::columns_of_log_softmax(const SlicedCall& call, const Range& range) {
    const RowSums sums = find_rows(call, range);
    std::vector<std::int64_t> sizes(call.result().sizes.begin(), call.result().sizes.end());
    sizes.back() = 1;
    at::Tensor found =
        argument(call, 0, {range}).sub(sums.largest.view(sizes)).sub_(sums.logarithm.view(sizes));
    compare_with_rows(call, range, found);
    return found;
}

// Return the columns `range` of the gradient of a loss, and one more with the gradient of each row
// whose target is in another column.
// NOLINTNEXTLINE(misc-no-recursion): as above
at::Tensor Evaluation::columns_from_loss(const SlicedCall& call, const Range& range) {
    const std::int64_t n = range.length();
    const at::Tensor gradient = argument(call, 0, {});
    const at::Tensor targets =
        usual_targets(argument(call, 2, {}), constant(call, 5).toInt(), call.result().sizes.back());
    const at::Tensor total = argument(call, 3, {});
    const at::Tensor inside = targets.ge(range.begin).logical_and_(targets.lt(range.end));
    const at::Tensor here =
        at::where(targets.eq(IGNORED), IGNORED, at::where(inside, targets.sub(range.begin), n));
    const at::Tensor like = at::zeros({1}, gradient.options()).expand({targets.size(0), n + 1});
    return at::nll_loss_backward(
        gradient, like, here, {}, constant(call, 4).toInt(), IGNORED, total
    );
}

// Remember the sums of the rows that were just computed.
void Evaluation::note_rows(
    const SlicedCall& call, const Box& box, const at::Tensor& input, const at::Tensor& result
) {
    const Geometry& whole = call.result();
    const auto last = static_cast<int>(whole.sizes.size()) - 1;
    if (axis_plan(call, last).way != SliceWay::columns) {
        return;
    }
    const std::int64_t width = whole.sizes.back();
    const std::int64_t rows = whole.numel() / width;
    Geometry part = narrowed(whole, box);
    const std::int64_t first = std::exchange(part.offset, 0) / width;
    RowSums& sums = sums_of(call);
    // Slices may overlap, because kernels compute no fewer rows than they need for equal bits.
    const std::int64_t n = part.numel() / width;
    if (!is_dense(part) || first > sums.known || first + n <= sums.known) {
        return;
    }
    if (!sums.largest.defined()) {
        sums.largest = at::empty({rows}, result.options());
        sums.logarithm = at::empty({rows}, result.options());
    }
    const at::Tensor largest = at::amax(input, -1);
    const at::Tensor where = at::argmax(input, -1, true);
    sums.largest.narrow(0, first, n).copy_(largest.reshape({n}));
    sums.logarithm.narrow(0, first, n).copy_(result.gather(-1, where).neg_().reshape({n}));
    sums.known = first + n;
    if (sums.known == rows) {
        const std::scoped_lock lock(slices_mutex);
        call.rows = sums;
    }
}

// Return the sums of rows that this evaluation knows. Those of another one are shared once they are
// complete, and do not change any more.
RowSums& Evaluation::sums_of(const SlicedCall& call) {
    RowSums& sums = sums_[&call];
    if (sums.known == 0) {
        const std::scoped_lock lock(slices_mutex);
        sums = call.rows;
    }
    return sums;
}

// Return the sums of all rows. Compute the rows if the sums are not known yet, in slices that need
// no more bytes than the columns `range`. NOLINTNEXTLINE(misc-no-recursion): as above
RowSums Evaluation::find_rows(const SlicedCall& call, const Range& range) {
    const int last = range.axis;
    const std::int64_t n = rows_of(call, last).sizes[0];
    RowSums& sums = sums_of(call);
    if (sums.known != n) {
        sums = {};
        each_block(
            n,
            rows_at_once(call, last, bytes_of(call, {range})),
            grain_of_rows(call, last).value_or(Grain()).unit,
            // NOLINTNEXTLINE(misc-no-recursion): as above
            [&](std::int64_t begin, std::int64_t end) { rows(call, last, begin, end); }
        );
    }
    // The kernel gives NaN another sign than the columns have.
    if (sums.known != n || sums.logarithm.isnan().any().item<bool>()) {
        refuse(call, last);
    }
    return sums;
}

std::vector<at::Tensor> Evaluation::gather_losses(const SlicedCall& call, const SlicePlan& plan) {
    const ReplayDispatchGuard guard(false);
    const Geometry& losses = call.signature->geometries[0];
    const std::int64_t n = losses.sizes[0];
    const at::Tensor targets =
        usual_targets(argument(call, 1, {}), constant(call, 4).toInt(), losses.sizes[1]);
    const at::Tensor ignored = targets.eq(IGNORED);
    const at::Tensor columns = at::where(ignored, 0, targets).unsqueeze(1);
    at::Tensor gathered;
    each_block(n, plan.length, plan.unit, [&](std::int64_t begin, std::int64_t end) {
        const at::Tensor rows = argument(call, 0, {{0, begin, end}});
        if (!gathered.defined()) {
            gathered = at::empty({n, 1}, rows.options());
        }
        gathered.narrow(0, begin, end - begin)
            .copy_(rows.gather(1, columns.narrow(0, begin, end - begin)));
    });
    // The kernel adds up one column of losses in the order in which it adds up those of the whole.
    auto [loss, total] = at::nll_loss_forward(
        gathered,
        at::where(ignored, IGNORED, at::zeros({1}, targets.options())),
        {},
        constant(call, 3).toInt(),
        IGNORED
    );
    return {loss, total};
}

namespace {

std::vector<StoragePtr> storages_of(std::span<const at::Tensor> results) {
    std::vector<StoragePtr> storages;
    for (const at::Tensor& each : results) {
        storages.push_back(storage_of(*each.unsafeGetTensorImpl()));
    }
    return storages;
}

}  // namespace

std::vector<StoragePtr> compute_whole(const SlicedCall& call, LeafStorage leaf) {
    return storages_of(Evaluation(leaf).run(call, {}));
}

std::vector<StoragePtr> compute_in_slices(
    const SlicedCall& call, const SlicePlan& plan, LeafStorage leaf
) {
    Evaluation evaluation(leaf);
    std::vector<at::Tensor> results;
    if (plan.axis == SlicePlan::GATHERED) {
        results = evaluation.gather_losses(call, plan);
    } else {
        const ReplayDispatchGuard guard(false);
        for (const Geometry& each : call.slicing().results) {
            results.push_back(
                at::empty_strided(each.sizes, each.strides, at::TensorOptions().dtype(each.dtype))
            );
        }
        const std::int64_t n = call.result().sizes[static_cast<std::size_t>(plan.axis)];
        each_block(n, plan.length, plan.unit, [&](std::int64_t begin, std::int64_t end) {
            const std::vector<at::Tensor> made = evaluation.run(call, {{plan.axis, begin, end}});
            for (std::size_t i = 0; i < made.size(); ++i) {
                results[i].narrow(plan.axis, begin, end - begin).copy_(made[i]);
            }
        });
    }
    return storages_of(results);
}

}  // namespace rekindle
