// Releases Python's GIL while a thread waits. This file is separate from torch/gil.h, because
// `base` includes no Python headers.
#pragma once

namespace rekindle {

// Scope in which this thread does not hold the GIL. If this thread holds the GIL at the beginning,
// the scope releases it, and takes it again at the end.
class WithoutGil final {
public:
    WithoutGil();
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;
    ~WithoutGil();

private:
    void* saved_ = nullptr;
};

}  // namespace rekindle
