// PyTorch's switches: what an operator's bits depend on beside its arguments.
//
// Default type, kernels of oneDNN, deterministic algorithms, precision of products, number of
// threads: a program may change each of them between the forward pass and recomputation. A recipe
// has them as they stood; recomputation puts them back to that, and afterwards to what the program
// set.
#pragma once

#include <cstdint>

namespace rekindle {

// The program's switches that decide which kernel runs, in one word; part of every signature.
std::int64_t switches();
// The precision of products, likewise; part of the signatures of products. Never 0.
std::int64_t precision();

// Both as they were when the program called, until the end.
class Switched final {
public:
    Switched(std::int64_t switches_then, std::int64_t precision_then);
    Switched(const Switched&) = delete;
    Switched& operator=(const Switched&) = delete;
    Switched(Switched&&) = delete;
    Switched& operator=(Switched&&) = delete;
    ~Switched();

private:
    std::int64_t now_;
    std::int64_t then_;
    std::int64_t precision_now_;
    std::int64_t precision_then_;
};

// Whether cuDNN tries its kernels and takes the quickest, which may be another one later.
bool kernels_are_timed();

}  // namespace rekindle
