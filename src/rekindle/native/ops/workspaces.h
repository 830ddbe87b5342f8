// Measures workspaces: memory that an operator uses internally and frees before it returns.
//
// Examples are scratch memory of convolutions, workspaces of cuBLAS and cuDNN, and intermediate
// results of composite operators. PyTorch's dispatcher does not show workspaces; only the allocator
// does. All calls of one signature (operator, shapes, dtypes) need the same workspace. So the
// workspace is measured in the first calls, and room is made for it before later ones. For the
// first call its size is guessed, and as much of that room is made as possible. On a CPU an
// allocation of the first call that would exceed the budget fails. If an earlier process measured
// the signature on a CPU, that measurement replaces the guess.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "../base/types.h"
#include "../torch/device.h"
#include "signature.h"

namespace rekindle {

// Smaller measurements are ignored: they come from rounding, or from Python numbers that became
// tensors.
inline constexpr Bytes NOTICED = 1'024;

// Bytes that one call used, as measured at the allocator.
struct WorkspaceUsed final {
    Bytes inside;  // Peak while the call ran, less the memory that it left allocated.
    // Memory that the call left allocated: its results.
    Bytes kept;
};

// Measures one running call, at the device's allocator or, on a CPU, at the counting allocator.
class WorkspaceProbe final {
public:
    // On a CPU, an allocation of this thread fails if the call would then use more than `limit`.
    explicit WorkspaceProbe(const Device& device, Bytes limit = UNLIMITED);
    WorkspaceProbe(const WorkspaceProbe&) = delete;
    WorkspaceProbe& operator=(const WorkspaceProbe&) = delete;
    WorkspaceProbe(WorkspaceProbe&&) = delete;
    WorkspaceProbe& operator=(WorkspaceProbe&&) = delete;
    ~WorkspaceProbe();

    // Return true if the device has an allocator that can be measured.
    static bool possible(const Device& device) noexcept;

    // End the measurement, and return it; none if the allocator cannot be measured.
    std::optional<WorkspaceUsed> end() const;
    // After a call that failed: return how many bytes, results included, the call would have used
    // if the limit had not refused an allocation; 0 if it refused none.
    Bytes refused() const noexcept;

private:
    const Device& device_;
    bool counts_;
    Bytes before_ = 0;
    Bytes returned_ = 0;
};

// Measurements are kept for the lifetime of the process, as signatures are: a budget uses those of
// earlier budgets. The functions below require the session mutex.

// Record the measured memory of a call of `signature`.
void learn_workspace(Signature& signature, const WorkspaceUsed& used, const Device& device);
// Return a guess of the bytes that the first call of a signature needs, `results` of them for its
// results as predicted. On a CPU it is what the first call in an earlier process used; else the
// workspace is guessed as 0, except for operators known for their workspaces.
Bytes guess_need(Signature& signature, Bytes results, const Device& device);
// Return how many bytes a first call probably needs, after the budget refused it memory at
// `refused` bytes. `results`: the part of these bytes that its results take.
Bytes likely_need(Signature& signature, Bytes results, Bytes refused, const Device& device);

// Bytes that first calls on the CPU used, results and workspace, by the number of the signature,
// which is the same in every process.
using NumberedWorkspaces = std::vector<std::pair<std::int64_t, Bytes>>;

// Replace the measurements of earlier processes.
void remember_workspaces(const NumberedWorkspaces& measured);
// Return the measurements of this process since the last call of this function.
NumberedWorkspaces take_new_workspaces();
// Forget all measured workspaces except those stored in a `Signature`.
void forget_workspaces() noexcept;

}  // namespace rekindle
