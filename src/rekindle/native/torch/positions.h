// Where random number generators stood, in little memory (R5).
//
// A CPU's generator is a Mersenne twister (Matsumoto and Nishimura 1998): 624 words, and where
// among them it stands. Once all have been drawn the next 624 are made of them. Its state takes
// 5,056 bytes, more than many a dropout's mask. So the words are kept once for a stretch of turns,
// and of a position on it only by how many turns it is ahead. To find that out while the program
// draws, another generator follows, a turn at a time; it gives up where that is not what happened
// since (another seed, another generator, or too much drawn at once: then the results are large,
// too). Several stretches are followed, so that programs with generators of their own, or that set
// one back as checkpoints do, keep few words as well. The states of other devices' generators are a
// few bytes and kept as they are.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "random.h"

namespace rekindle {

// The words from which positions on one stretch count turns: as they were, or those that a seed
// gives.
class Start final : public c10::intrusive_ptr_target {
public:
    explicit Start(const Words& there);
    explicit Start(std::uint64_t seed);
    Start(const Start&) = delete;
    Start& operator=(const Start&) = delete;
    Start(Start&&) = delete;
    Start& operator=(Start&&) = delete;
    ~Start() override;

    Words words() const;

private:
    std::size_t nbytes() const noexcept;

    const std::unique_ptr<const Words> words_;  // null: those of the seed
    const std::uint64_t seed_ = 0;
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
    // From a start on, one turn after the other.
    struct Stretch final {
        c10::weak_intrusive_ptr<c10::GeneratorImpl> generator;
        c10::intrusive_ptr<Start> start;
        Words now;      // those that are followed,
        int turns = 0;  // so many turns later
    };

    const Stretch& stretch_at(const Random& there);
    bool reach(Stretch& stretch, const Words& words);
    Stretch begin(const Random& there) const;

    std::vector<Stretch> stretches_;  // a few, the one that was used last in front
    int pause_ = 0;                   // so many times nothing is followed
};

// Of all positions there are.
std::size_t bytes_of_positions() noexcept;

}  // namespace rekindle
