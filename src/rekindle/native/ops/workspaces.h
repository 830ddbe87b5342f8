// Measures workspaces: memory that an operator uses internally and frees before it returns.
//
// Examples are scratch memory of convolutions, workspaces of cuBLAS and cuDNN, and intermediate
// results of composite operators. PyTorch's dispatcher does not show workspaces; only the allocator
// does. All calls of one signature (operator, shapes, dtypes) need the same workspace. So the
// runtime measures the workspace in the first calls, and makes room for it before later calls.
// Before the first call, the runtime guesses the workspace and makes as much of that room as
// possible. On a CPU an allocation of the first call that would exceed the budget fails. If an
// earlier process measured the signature on a CPU, that measurement replaces the guess.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "../allocator/counting_allocator.h"
#include "../base/types.h"
#include "../torch/device.h"
#include "signature.h"

namespace rekindle {

// Smaller workspaces are ignored: they come from rounding, or from Python numbers that became
// tensors.
inline constexpr Bytes NOTICED = 1'024;

// Bytes that one operator call used, as measured at the allocator.
struct WorkspaceUsed final {
    Bytes inside;  // Peak during the call, less `kept`: the workspace.
    // Memory that the call left allocated: the results.
    Bytes kept;
};

// Measures the memory of one operator call, at the device's allocator or, on a CPU, at the counting
// allocator.
class WorkspaceProbe final {
public:
    // On a CPU, an allocation of the current thread fails if the call would use more than `limit`
    // with it, and `move` does not raise the limit.
    WorkspaceProbe(const Device& device, Bytes limit, std::optional<MoveLimit> move);
    WorkspaceProbe(const WorkspaceProbe&) = delete;
    WorkspaceProbe& operator=(const WorkspaceProbe&) = delete;
    ~WorkspaceProbe();

    // Return true if the device has an allocator that can be measured.
    static bool possible(const Device& device) noexcept;

    // End the measurement, and return the bytes used; none if the allocator cannot be measured.
    std::optional<WorkspaceUsed> end() const;
    // After a failed call: return how many bytes the call, results included, would have used with
    // the allocation that the limit refused. Return 0 if the limit refused none.
    Bytes refused() const noexcept;

private:
    const Device& device_;
    bool counts_;
    Bytes before_ = 0;
    Bytes returned_ = 0;
};

// Measured workspaces are kept until the process ends, so a budget uses the measurements of earlier
// budgets. The functions below require the session mutex.

// Record how much memory a call of `signature` used.
void learn_workspace(Signature& signature, const WorkspaceUsed& used, const Device& device);
// Guess how many bytes the first call of a signature needs. `results`: predicted bytes of its
// results. On a CPU, if an earlier process measured the signature, return that measurement.
// Otherwise the guess for the workspace is 0 on a CPU, except for operators known for their
// workspaces.
Bytes guess_need(Signature& signature, Bytes results, const Device& device);
// Estimate how many bytes a first call needs, after the budget refused an allocation that would
// have raised its use to `refused` bytes. `results`: bytes of its results.
Bytes likely_need(Signature& signature, Bytes results, Bytes refused, const Device& device);

// Measurements of first calls on the CPU: the number of the signature, and the bytes of results and
// workspace. The number is the same in every process.
using NumberedWorkspaces = std::vector<std::pair<std::int64_t, Bytes>>;

// Use `measured`, the workspaces that earlier processes measured, in place of all workspaces
// remembered before.
void remember_workspaces(const NumberedWorkspaces& measured);
// Return the measurements that this process made since the last call of this function.
NumberedWorkspaces take_new_workspaces();
// Forget all measured workspaces except those stored in a `Signature`.
void forget_workspaces() noexcept;

}  // namespace rekindle
