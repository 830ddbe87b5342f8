// Releases the GIL while a thread waits. Declared apart from torch/gil.h because `base` includes no
// Python.
#pragma once

namespace rekindle {

// Scope without the GIL. Releases it if this thread holds it, and takes it back at the end.
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
