// The state of the generator that an operator drew from (R5).
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>
#include <span>

#include "../base/types.h"

namespace rekindle {

// All the words that a generator makes at once.
using Words = decltype(at::mt19937_data_pod::state_);

// What a generator has beside them: where among them it stands, and what it keeps for next time.
struct Around final {
    std::uint64_t seed;
    int left;
    std::uint32_t next;
    bool seeded;
    std::optional<float> next_float;
    std::optional<double> next_double;
};

class Random final {
public:
    // As the generator is now.
    explicit Random(const at::Generator& generator);
    // As it was when it said so of itself, but for the words: those are given.
    Random(const at::Generator& generator, const Around& around, const Words& words);
    Random(const Random&) = delete;
    Random& operator=(const Random&) = delete;
    Random(Random&&) = delete;
    Random& operator=(Random&&) = delete;
    ~Random() = default;

    // Puts the generator back to where it was then.
    void restore() const;

    const at::Generator& generator() const noexcept { return generator_; }

    const Words& words() const noexcept { return data_.state_; }

    Around around() const noexcept {
        return {data_.seed_, data_.left_, data_.next_, data_.seeded_, next_float_, next_double_};
    }

private:
    at::Generator generator_;
    at::mt19937_data_pod data_;
    std::optional<float> next_float_;
    std::optional<double> next_double_;
};

// The generator that a random operator draws from; not defined if it is none of the CPU's.
at::Generator generator_of(std::span<const c10::IValue> extras);

}  // namespace rekindle
