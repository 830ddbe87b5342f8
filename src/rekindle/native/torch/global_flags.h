// Global settings of PyTorch on which the bits of a result depend.
//
// These are the default dtype, oneDNN kernels, deterministic algorithms, precision of matrix
// products, number of threads. A program may change each between the forward pass and a
// recomputation. So a recipe stores them; a recomputation sets them and afterwards restores the
// program's settings.
#pragma once

#include <cstdint>

namespace rekindle {

// Return the settings that decide which kernel runs, packed into one word. The word is part of each
// signature.
std::int64_t global_flags();
// Return the settings of products, packed into one word, which is never 0: the precisions in
// float32, and switches that no other operator reads. The word is part of the signatures of
// operators that sum products. If `only_matrix`, the operator multiplies matrices, so precisions of
// other products may be left out.
std::int64_t product_flags(bool only_matrix);

// Scope in which PyTorch's global settings are those that were active when the program called the
// operator. Otherwise a recomputation could give other bits.
class ScopedGlobalFlags final {
public:
    ScopedGlobalFlags(std::int64_t switches_then, std::int64_t products_then);
    ScopedGlobalFlags(const ScopedGlobalFlags&) = delete;
    ScopedGlobalFlags& operator=(const ScopedGlobalFlags&) = delete;
    ScopedGlobalFlags(ScopedGlobalFlags&&) = delete;
    ScopedGlobalFlags& operator=(ScopedGlobalFlags&&) = delete;
    ~ScopedGlobalFlags();

private:
    std::int64_t now_;
    std::int64_t then_;
    std::int64_t products_now_;
    std::int64_t products_then_;
};

// Return true if cuDNN times its kernels and uses the fastest one (`cudnn.benchmark`). Then a
// recomputation may use another kernel than the first run.
bool kernels_are_timed();

}  // namespace rekindle
