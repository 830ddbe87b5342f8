// Calls whose results are computed slice by slice, and how to do so with the bits of the whole.
//
// See NOTE [Operators in slices] in ops/slicing.h. A `SlicedCall` is an operator call of which some
// arguments may be results of other sliced calls, which have never been in memory. A slice of the
// result is computed from slices of the arguments, down to values that are in memory (leaves).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../../base/types.h"
#include "../../ops/signature.h"
#include "../../ops/slicing.h"
#include "../../torch/storage_ptr.h"
#include "slice.h"

namespace rekindle {

struct SlicedCall;
struct StorageRecord;

using SlicedCallPtr = c10::intrusive_ptr<SlicedCall>;

// A tensor argument: a value that can be in memory, or the result of a call that runs in slices. It
// is neither if the operator reads only the shape of the argument.
struct SlicedArgument final {
    StorageRecord* leaf = nullptr;
    SlicedCallPtr call;
};

// For each row of the input of `log_softmax`: its largest element, and the logarithm of the row's
// sum of exponentials. With both, columns of the result can be computed.
struct RowSums final {
    at::Tensor largest;
    at::Tensor logarithm;
    std::int64_t known = 0;  // rows known so far, from the first

    Bytes nbytes() const {
        return largest.defined() ? static_cast<Bytes>(largest.nbytes() + logarithm.nbytes()) : 0;
    }
};

// Axes of a tensor, as bits of a mask.
using AxisMask = std::uint32_t;

constexpr AxisMask bit(int axis) noexcept {
    return AxisMask{1} << static_cast<unsigned>(axis);
}

// How slices along an axis of the result are computed. `columns`: the axis is the one that a loss
// adds up, and the sums of the rows are computed first. `through_rows`: all rows are computed as a
// whole, some at once, and cut, because there is no other way to get the same bits.
enum class SliceWay : std::uint8_t { none, by_kernel, columns, through_rows };

// Which slices along an axis are possible, and how they are computed.
struct AxisPlan final {
    SliceWay way = SliceWay::none;
    Grain grain;
};

// What was found out about the axes of a call. It holds as long as no trial fails.
struct AxisPlans final {
    struct Entry final {
        int axis;
        AxisMask fixed;
        AxisPlan plan;
    };

    std::int64_t failed_trials = -1;
    std::vector<Entry> entries;
};

// The time of a call itself, without the calls that it reads, since `time_once` looked at it.
struct SliceTime final {
    Nanoseconds spent = 0;
    std::int64_t elements = 0;  // how many elements of its first result were computed
    bool counted = false;       // an earlier `time_once` has counted the call
};

// An operator call that runs in slices. Only its first result may be read by another one.
struct SlicedCall final : c10::intrusive_ptr_target {
    c10::intrusive_ptr<Signature> signature;
    std::vector<c10::IValue> unkeyed_args;
    bool grad_mode = false;
    std::vector<SlicedArgument> arguments;
    // What threads that compute slices have learned (`slices_mutex`). Sums are here once those of
    // all rows are known.
    mutable RowSums rows;
    mutable AxisPlans axes;
    mutable SliceTime time;

    // NOLINTNEXTLINE(bugprone-unchecked-optional-access): found before the call was made
    const Slicing& slicing() const { return *signature->slicing; }

    const Geometry& result() const { return slicing().results[0]; }
};

// Return true if `call` calls the operator `name`.
inline bool is_called(const SlicedCall& call, const char* name) {
    return call.signature->facts.name == name;
}

// A slice is computed by at most so many calls. Scenario: a loop has no room; each state could be
// computed from the one before, from the first on.
constexpr std::int64_t MOST_CALLS = 64;

// Return how many calls compute a slice of `call`. What two calls read is computed twice.
std::int64_t calls_of(const SlicedCall& call);
// Add the leaves of `call` to `found`, each once.
void collect_leaves(const SlicedCall& call, std::vector<StorageRecord*>& found);
// Return the estimated time of `call`, from the measured times of its operators.
Nanoseconds cost_of(const SlicedCall& call);
// After `call` has run, return the time in which it and the calls that it reads are computed once.
// Calls that were counted before do not count again: whatever reads them recomputes them.
Nanoseconds time_once(const SlicedCall& call);
// Forget the sums of rows that `call` and the calls that it reads have computed, if they have more
// than `most` bytes.
void forget_rows(const SlicedCall& call, Bytes most = 0);

}  // namespace rekindle
