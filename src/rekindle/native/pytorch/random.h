// The state of the generator that an operator drew from (R5).
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include <optional>
#include <span>

#include "../base/types.h"

namespace rekindle {

class Random final {
public:
    // As the generator is now.
    explicit Random(const at::Generator& generator);
    Random(const Random&) = delete;
    Random& operator=(const Random&) = delete;
    Random(Random&&) = delete;
    Random& operator=(Random&&) = delete;
    ~Random() = default;

    // Puts the generator back to where it was then.
    void restore() const;

    const at::Generator& generator() const noexcept { return generator_; }

private:
    at::Generator generator_;
    at::mt19937 engine_;
    std::optional<float> next_float_;
    std::optional<double> next_double_;
};

// The generator that a random operator draws from; not defined if it is none of the CPU's.
at::Generator generator_of(std::span<const c10::IValue> extras);

}  // namespace rekindle
