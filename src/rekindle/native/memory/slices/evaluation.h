// Computes slices of the results of sliced calls.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "../../torch/storage_ptr.h"
#include "plan.h"
#include "sliced_call.h"

namespace rekindle {

// Error: slices gave other bits than the whole. The caller then does without slices.
struct UnequalSlices final : std::exception {
    const char* what() const noexcept override {
        return "an operator gave other bits in slices than as a whole";
    }
};

// Return the storage of a leaf, which is in memory.
using LeafStorage = c10::function_ref<StoragePtr(StorageRecord&)>;

// Computes slices. Runs kernels below autograd and Rekindle's own dispatch key.
class Evaluation final {
public:
    explicit Evaluation(LeafStorage leaf) : leaf_(leaf) {}

    // Return the results of `call` at the positions `box` of its first result.
    std::vector<at::Tensor> run(const SlicedCall& call, const Box& box);
    // Return the positions `box` of the argument `index` of `call`.
    at::Tensor argument(const SlicedCall& call, std::size_t index, const Box& box);
    // Return the results of `nll_loss_forward`, of which `length` rows are in memory at once.
    std::vector<at::Tensor> gather_losses(const SlicedCall& call, const SlicePlan& plan);

private:
    std::vector<at::Tensor> compute(const SlicedCall& call, const Box& box);
    std::vector<at::Tensor> run_kernel(
        const SlicedCall& call, const Box& box, std::vector<at::Tensor> arguments
    );
    std::vector<at::Tensor> run_kernel(const SlicedCall& call, std::vector<at::Tensor> arguments);
    at::Tensor joined(const SlicedCall& call, const Box& box);
    at::Tensor slice(const SlicedCall& call, const Slice& wanted);
    at::Tensor columns(const SlicedCall& call, const Range& range);
    at::Tensor columns_of_rows(const SlicedCall& call, const Range& range);
    at::Tensor columns_of_log_softmax(const SlicedCall& call, const Range& range);
    at::Tensor columns_from_loss(const SlicedCall& call, const Range& range);
    at::Tensor rows(const SlicedCall& call, int axis, std::int64_t begin, std::int64_t end);
    void note_rows(
        const SlicedCall& call, const Box& box, const at::Tensor& input, const at::Tensor& result
    );
    RowSums& sums_of(const SlicedCall& call);
    RowSums find_rows(const SlicedCall& call, const Range& range);
    void try_pieces(
        const SlicedCall& call,
        const Box& box,
        std::span<const at::Tensor> arguments,
        std::span<const at::Tensor> results
    );
    void compare_with_rows(const SlicedCall& call, const Range& range, const at::Tensor& found);

    LeafStorage leaf_;
    std::map<const SlicedCall*, RowSums> sums_;  // those that this evaluation knows
    Nanoseconds inside_ = 0;  // time of the calls that the running call has read so far
};

// Compute the results of `call`, and all that it reads, as a whole.
std::vector<StoragePtr> compute_whole(const SlicedCall& call, LeafStorage leaf);
// Compute the results of `call` by `plan`. Throw `UnequalSlices` if a trial fails.
std::vector<StoragePtr> compute_in_slices(
    const SlicedCall& call, const SlicePlan& plan, LeafStorage leaf
);
}  // namespace rekindle
