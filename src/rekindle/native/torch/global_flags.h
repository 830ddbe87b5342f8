// Global settings of PyTorch on which the bits of a result depend.
//
// These are the default dtype, oneDNN kernels, deterministic algorithms, precision of matrix
// products, number of threads. A program may change each between the forward pass and a
// recomputation. So a recipe stores them; a recomputation sets them and afterwards restores the
// program's settings.
//
// NOTE [Settings that other threads see]
//
// No other thread may see these temporary settings (R9, everything else runs once). The number of
// threads and the flag for denormal numbers are set for the recomputing thread alone. The other
// settings belong to the whole process. They are set only if the program has changed them since the
// first run. Then the thread holds the GIL and the session mutex while the kernel runs. So no
// Python code reads the settings meanwhile, and no operator of the budget begins. A kernel that
// another thread began before could see them. Operators that are not PyTorch's run without these
// locks, because they may wait for other threads.
#pragma once

#include <cstdint>
#include <optional>

#include "gil.h"

namespace rekindle {

// Return the settings that decide which kernel runs, packed into one word. The word is part of each
// signature.
std::int64_t global_flags();
// Return the number of threads in a word of `global_flags`.
int threads_in(std::int64_t switches);
// Return the settings of products, packed into one word, which is never 0: the precisions in
// float32, and switches that no other operator reads. The word is part of the signatures of
// operators that sum products. If `only_matrix`, the operator multiplies matrices, so precisions of
// other products may be left out.
std::int64_t product_flags(bool only_matrix);

// Return `switches`, a word of `global_flags`, with the present default dtype.
std::int64_t with_present_dtype(std::int64_t switches);
// Return true if settings of the whole process differ from those in the arguments.
bool flags_of_process_differ(std::int64_t switches_then, std::int64_t products_then);

// Scope in which PyTorch's global settings are those that were active when the program called the
// operator. Otherwise a recomputation could give other bits. If `alone`, this thread holds the GIL
// while settings of the whole process differ from the program's.
class ScopedGlobalFlags final {
public:
    ScopedGlobalFlags(std::int64_t switches_then, std::int64_t products_then, bool alone);
    ScopedGlobalFlags(const ScopedGlobalFlags&) = delete;
    ScopedGlobalFlags& operator=(const ScopedGlobalFlags&) = delete;
    ~ScopedGlobalFlags();

private:
    void set(std::int64_t switches, std::int64_t products) const;

    const std::int64_t now_;
    const std::int64_t then_;
    const std::int64_t products_now_;
    const std::int64_t products_then_;
    std::optional<Gil> alone_;
};

// Return true if cuDNN times its kernels and uses the fastest one (`cudnn.benchmark`). Then a
// recomputation may use another kernel than the first run.
bool kernels_are_timed();

}  // namespace rekindle
