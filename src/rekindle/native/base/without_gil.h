// Releases Python's GIL while a thread waits. This is separate from torch/gil.h because `base`
// includes no Python headers.
#pragma once

namespace rekindle {

// Scope in which this thread does not hold the GIL. It releases the GIL if this thread holds it,
// and takes it back at the end.
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
