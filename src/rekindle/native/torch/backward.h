// Tracks running backward passes.
#pragma once

namespace rekindle {

// Return true if this thread runs one.
bool in_backward_pass();
// Return true if any thread runs one.
bool is_any_backward_pass() noexcept;

// Scope of a backward pass.
class BackwardPass final {
public:
    BackwardPass() noexcept;
    BackwardPass(const BackwardPass&) = delete;
    BackwardPass& operator=(const BackwardPass&) = delete;
    BackwardPass(BackwardPass&&) = delete;
    BackwardPass& operator=(BackwardPass&&) = delete;
    ~BackwardPass();
};

}  // namespace rekindle
