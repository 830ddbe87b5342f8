// Where random number generators stood, in little memory (R5). Twin of
// rekindle.pytorch.operators._positions, where the reasons are.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <memory>

#include "random.h"

namespace rekindle {

// The words from which positions on one stretch count turns.
struct Start final : c10::intrusive_ptr_target {
    explicit Start(const Words& there);
    Start(const Start&) = delete;
    Start& operator=(const Start&) = delete;
    Start(Start&&) = delete;
    Start& operator=(Start&&) = delete;
    ~Start() override;

    const Words words;
};

// Where a generator stood.
class Position final {
public:
    Position(const Random& there, c10::intrusive_ptr<Start> start, int turns);
    // Of a device's.
    Position(at::Generator generator, const Drawn& there);
    Position(const Position&) = delete;
    Position& operator=(const Position&) = delete;
    Position(Position&&) = delete;
    Position& operator=(Position&&) = delete;
    ~Position();

    const at::Generator& generator() const noexcept { return generator_; }

    // Puts the generator back there.
    void restore() const;

    // Null: it is the CPU's.
    const Drawn* on_device() const noexcept { return start_ ? nullptr : &drawn_; }

private:
    const at::Generator generator_;
    const Around around_{};
    const c10::intrusive_ptr<Start> start_;  // shared with others; null: of a device
    const int turns_ = 0;                    // from there on
    const Drawn drawn_{};
};

// Of all generators that a call draws from, before it.
using Noted = c10::SmallVector<std::unique_ptr<Position>, 1>;

// Where generators stood when a program drew from them, one operator after the other.
class Positions final {
public:
    // Where `generator` is now.
    std::unique_ptr<Position> note(const at::Generator& generator);

private:
    bool reach(const Words& words);

    c10::intrusive_ptr<Start> start_;  // of the stretch; null: there is none yet
    Words now_{};                      // those that are followed,
    int turns_ = 0;                    // so many turns later
    int pause_ = 0;
};

// Of all positions there are.
std::size_t bytes_of_positions() noexcept;

}  // namespace rekindle
