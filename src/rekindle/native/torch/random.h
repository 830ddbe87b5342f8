// The state of the generator that an operator drew from (R5).
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <c10/util/SmallVector.h>

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
    explicit Random(at::Generator generator);
    // As it was when it said so of itself, but for the words: those are given.
    Random(at::Generator generator, const Around& around, const Words& words);
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

// The generator of a device, which is no more than these: where it stood.
struct Drawn final {
    std::uint64_t seed;
    std::uint64_t offset;

    static Drawn of(const at::Generator& generator);
    // Puts the generator back there, for good.
    void restore(at::Generator generator) const;
};

// Until the end a device's generator goes on from `there`; afterwards from where it was. Not by
// setting its state: each makes the next cuDNN RNN with dropout seed itself anew, from the default
// generator. Another state put in the place of its own does not.
class DrawingFrom final {
public:
    DrawingFrom(const at::Generator& generator, const Drawn& there);
    DrawingFrom(const DrawingFrom&) = delete;
    DrawingFrom& operator=(const DrawingFrom&) = delete;
    DrawingFrom(DrawingFrom&&) = delete;
    DrawingFrom& operator=(DrawingFrom&&) = delete;
    ~DrawingFrom();

private:
    at::Generator generator_;
    at::Generator mine_;
};

using Generators = c10::SmallVector<at::Generator, 1>;

// The default generator of a device.
at::Generator default_generator(c10::Device device);
// The generator that is among `extras`; not defined if none is.
at::Generator given_generator(std::span<const c10::IValue> extras);
// Whether it is of a kind whose state is known here.
bool is_known(const at::Generator& generator) noexcept;

}  // namespace rekindle
