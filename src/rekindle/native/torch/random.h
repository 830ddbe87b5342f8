// States of random number generators, so that a recomputed operator draws the same numbers (R5,
// randomness).
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <span>

#include "../base/types.h"

namespace rekindle {

// The 624 words of state that the CPU generator (Mersenne twister) computes at once.
using MtWords = decltype(at::mt19937_data_pod::state_);

// State of a CPU generator other than its words: the position among the words, and cached normal
// samples.
struct MtState final {
    std::uint64_t seed;
    int left;
    std::uint32_t next;
    bool seeded;
    std::optional<float> next_float;
    std::optional<double> next_double;
};

// Full state of a CPU generator, to be restored later.
class Random final {
public:
    // Store the current state of `generator`.
    explicit Random(at::Generator generator);
    // Build the full state of a CPU generator from its stored parts: `words` are the 624 state
    // words of the Mersenne Twister, `around` is the rest of the state.
    Random(at::Generator generator, const MtState& around, const MtWords& words);
    Random(const Random&) = delete;
    Random& operator=(const Random&) = delete;
    ~Random() = default;

    // Set the CPU generator `generator()` to this state.
    void restore() const;

    // Return true if `other` is the same state.
    bool is_at(const Random& other) const noexcept;

    const at::Generator& generator() const noexcept { return generator_; }

    const MtWords& words() const noexcept { return data_.state_; }

    MtState around() const noexcept {
        return {data_.seed_, data_.left_, data_.next_, data_.seeded_, next_float_, next_double_};
    }

private:
    at::Generator generator_;
    at::mt19937_data_pod data_;
    std::optional<float> next_float_;
    std::optional<double> next_double_;
};

// State of a device's generator (Philox).
struct PhiloxState final {
    std::uint64_t seed;
    std::uint64_t offset;

    static PhiloxState of(const at::Generator& generator);
    // Set `generator`, a generator of a device, to this state.
    void restore(at::Generator generator) const;
};

using Generators = c10::SmallVector<at::Generator, 1>;

// Return PyTorch's default generator of a device.
at::Generator default_generator(c10::Device device);
// Return the generator among an operator's arguments; undefined if there is none.
at::Generator given_generator(std::span<const c10::IValue> unkeyed_args);
// Return true if the runtime can store and restore states of this kind of generator.
bool is_known(const at::Generator& generator) noexcept;

}  // namespace rekindle
