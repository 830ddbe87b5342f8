// To wait without Python's own lock.
#pragma once

namespace rekindle {

// Gives the GIL up, if this thread has it, until the end.
class WithoutGil final {
public:
    WithoutGil();
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;
    WithoutGil(WithoutGil&&) = delete;
    WithoutGil& operator=(WithoutGil&&) = delete;
    ~WithoutGil();

private:
    void* saved_ = nullptr;
};

}  // namespace rekindle
