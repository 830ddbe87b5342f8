// Measures workspaces: memory that an operator uses internally and frees before it returns.
//
// Examples are scratch memory of convolutions, workspaces of cuBLAS and cuDNN, and intermediate
// results of composite operators. PyTorch's dispatcher does not show workspaces; only the allocator
// does. All calls of one signature need the same workspace. So the workspace is measured in the
// first calls, and room is made for it before later ones. For the first call its size is guessed,
// and as much of that room is made as possible.
#pragma once

#include <optional>

#include "../base/types.h"
#include "../torch/device.h"
#include "signature.h"

namespace rekindle {

// Bytes that one call used, as measured at the allocator.
struct WorkspaceUsed final {
    Bytes inside;  // Peak while the call ran, without the memory that remains allocated.
    // Memory that remains allocated after the call, in addition to what was allocated before.
    Bytes kept;
};

// Measurement of one running call, by the device's allocator or, on a CPU, the counting allocator.
class WorkspaceProbe final {
public:
    explicit WorkspaceProbe(const Device& device);
    WorkspaceProbe(const WorkspaceProbe&) = delete;
    WorkspaceProbe& operator=(const WorkspaceProbe&) = delete;
    WorkspaceProbe(WorkspaceProbe&&) = delete;
    WorkspaceProbe& operator=(WorkspaceProbe&&) = delete;
    ~WorkspaceProbe();

    // Return true if the device has an allocator that can be measured.
    static bool possible(const Device& device) noexcept;

    // Return the measurement after the call; none if the allocator cannot be measured.
    std::optional<WorkspaceUsed> end() const;

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
// Return a guess of the workspace of the first call of a signature. On a CPU it is 0, except for
// operators known for their workspaces.
Bytes guess_workspace(const Signature& signature, const Device& device);
// Forget the workspaces measured for all kinds of operators.
void forget_workspaces() noexcept;

}  // namespace rekindle
