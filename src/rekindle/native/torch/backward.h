// Backward passes that go on.
#pragma once

namespace rekindle {

// Whether this thread is within one.
bool in_backward_pass();
// Whether any thread is.
bool is_any_backward_pass() noexcept;

// One more, as long as it lives.
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
