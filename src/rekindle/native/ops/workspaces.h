// Measures workspaces: memory that an operator uses internally and frees before it returns.
//
// Examples are scratch memory of convolutions, workspaces of cuBLAS and cuDNN, and intermediate
// results of composite operators. No dispatcher shows them, only the allocator. Calls of one
// signature need the same workspace. So it is measured in the first calls, and room is made for it
// before later ones. Before the first call the size is guessed, and room is made as far as
// possible.
#pragma once

#include <optional>

#include "../base/types.h"
#include "../torch/device.h"
#include "signature.h"

namespace rekindle {

// Memory of one call, as measured at the allocator.
struct WorkspaceUsed final {
    Bytes inside;  // Peak while it ran, without the memory that remains.
    Bytes kept;    // Memory that remains, in addition to what was there before.
};

// Measurement of one running call, at the device's allocator or the counting one.
class WorkspaceProbe final {
public:
    explicit WorkspaceProbe(const Device& device);
    WorkspaceProbe(const WorkspaceProbe&) = delete;
    WorkspaceProbe& operator=(const WorkspaceProbe&) = delete;
    WorkspaceProbe(WorkspaceProbe&&) = delete;
    WorkspaceProbe& operator=(WorkspaceProbe&&) = delete;
    ~WorkspaceProbe();

    // Return true if there is an allocator that can be measured.
    static bool possible(const Device& device) noexcept;

    // Return the measurement after the call; none if it was impossible.
    std::optional<WorkspaceUsed> end() const;

private:
    const Device& device_;
    bool counts_;
    Bytes before_ = 0;
    Bytes returned_ = 0;
};

// Measurements are kept for the lifetime of the process, as signatures are: a budget uses those of
// earlier budgets. The functions below require the session mutex.

// Record the measurement of a call.
void learn_workspace(Signature& signature, const WorkspaceUsed& used, const Device& device);
// Return a guess for the first call of a signature. On a CPU it is 0, except for operators known
// for workspaces.
Bytes guess_workspace(const Signature& signature, const Device& device);
// Forget the workspaces of operators by kind.
void forget_workspaces() noexcept;

}  // namespace rekindle
