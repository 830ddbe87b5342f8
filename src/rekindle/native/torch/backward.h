// Tracks which threads run a backward pass of autograd.
#pragma once

namespace rekindle {

// Return true if this thread runs a backward pass.
bool in_backward_pass();
// Return true if any thread runs a backward pass.
bool is_any_backward_pass() noexcept;

// Scope in which this thread counts as running a backward pass of autograd.
class BackwardPass final {
public:
    BackwardPass() noexcept;
    BackwardPass(const BackwardPass&) = delete;
    BackwardPass& operator=(const BackwardPass&) = delete;
    ~BackwardPass();
};

}  // namespace rekindle
