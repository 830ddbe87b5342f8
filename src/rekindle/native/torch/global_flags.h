// Global settings of PyTorch on which the bits of a result depend.
//
// Default dtype, oneDNN kernels, deterministic algorithms, precision of matrix products, number of
// threads: a program may change each between the forward pass and a recomputation. A recipe stores
// them. A recomputation sets them, and afterwards restores those of the program.
#pragma once

#include <cstdint>

namespace rekindle {

// Return the settings that choose kernels, packed into one word. Part of each signature.
std::int64_t global_flags();
// Return the precisions of matrix products, packed into one word. Part of the signatures of
// products; never 0.
std::int64_t matmul_precision_flags();

// Scope with the settings that were active when the program called the operator.
class ScopedGlobalFlags final {
public:
    ScopedGlobalFlags(std::int64_t switches_then, std::int64_t precision_then);
    ScopedGlobalFlags(const ScopedGlobalFlags&) = delete;
    ScopedGlobalFlags& operator=(const ScopedGlobalFlags&) = delete;
    ScopedGlobalFlags(ScopedGlobalFlags&&) = delete;
    ScopedGlobalFlags& operator=(ScopedGlobalFlags&&) = delete;
    ~ScopedGlobalFlags();

private:
    std::int64_t now_;
    std::int64_t then_;
    std::int64_t precision_now_;
    std::int64_t precision_then_;
};

// Return true if cuDNN times its kernels and takes the fastest, which may be another one later.
bool kernels_are_timed();

}  // namespace rekindle
