// Stores many states of random number generators in little memory, for recomputation (R5,
// randomness).
//
// NOTE [Compact generator states]
//
// The CPU generator is a Mersenne twister (Matsumoto and Nishimura 1998): 624 words and a position
// among them. Once all words are drawn, the next 624 are computed from them; that is called a turn.
// A full state takes 5,056 bytes, more than the mask of many a dropout. So the words are stored
// once for many consecutive turns, a stretch. A state on a stretch is stored as its number of turns
// from the start of the stretch.
//
// To find that number, the runtime advances a copy of the generator turn by turn until it matches.
// It gives up after `MOST` turns: the program set another seed, uses another generator, or drew a
// great many numbers at once. In the last case the results are large, too. Several stretches are
// followed at a time. So programs with several generators, or that reset one as checkpointing does,
// also store few words.
//
// States of device generators take a few bytes and are stored as they are.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "random.h"

namespace rekindle {

// Start of a stretch (a run of consecutive turns of the Mersenne twister): the words of the
// generator, stored or derived from a seed.
class MtBlock final : public c10::intrusive_ptr_target {
public:
    explicit MtBlock(const MtWords& there);
    explicit MtBlock(std::uint64_t seed);
    MtBlock(const MtBlock&) = delete;
    MtBlock& operator=(const MtBlock&) = delete;
    ~MtBlock() override;

    MtWords words() const;

private:
    std::size_t nbytes() const noexcept;

    // Words of the generator at the start of the stretch; null if they are derived from `seed_`.
    const std::unique_ptr<const MtWords> words_;
    const std::uint64_t seed_ = 0;
};

// One stored state of a generator.
class RngCheckpoint final {
public:
    RngCheckpoint(const Random& there, c10::intrusive_ptr<MtBlock> start, int turns);
    // Store the state `there` of a device's generator.
    RngCheckpoint(at::Generator generator, const PhiloxState& there);
    RngCheckpoint(const RngCheckpoint&) = delete;
    RngCheckpoint& operator=(const RngCheckpoint&) = delete;
    ~RngCheckpoint();

    const at::Generator& generator() const noexcept { return generator_; }

    // Set the generator to the state that this object stores.
    void restore() const { restore_to(generator_); }

    // Return a new generator of the same kind that has the state that this object stores.
    at::Generator copy() const;

    // Return true if this is the state of a device's generator.
    bool is_on_device() const noexcept { return !start_; }

private:
    void restore_to(const at::Generator& generator) const;

    const at::Generator generator_;
    const MtState around_{};
    // Start of the stretch, shared by all stored states of the stretch; null for a device's
    // generator.
    const c10::intrusive_ptr<MtBlock> start_;
    const int turns_ = 0;  // turns of the Mersenne twister since the start of the stretch
    const PhiloxState philox_{};
};

// States that all generators of a call had before the call.
using RngCheckpoints = c10::SmallVector<std::unique_ptr<RngCheckpoint>, 1>;

// Records the states of generators before each operator that draws random numbers.
class RngHistory final {
public:
    // Store the current state of `generator` for a later recomputation.
    std::unique_ptr<RngCheckpoint> note(const at::Generator& generator);

private:
    // A sequence of stored states that the next states of `generator` may continue.
    struct Stretch final {
        c10::weak_intrusive_ptr<c10::GeneratorImpl> generator;
        c10::intrusive_ptr<MtBlock> start;
        MtWords now;    // words of the latest state stored on this stretch
        int turns = 0;  // turns of the Mersenne twister from the start of the stretch to `now`
    };

    const Stretch& stretch_at(const Random& there);
    bool reach(Stretch& stretch, const MtWords& words);
    Stretch begin(const Random& there) const;

    std::vector<Stretch> stretches_;  // Stretches that are followed, the most recently used first.
    int pause_ = 0;                   // number of further calls during which no stretch is searched
};

// Return the bytes that all stored states of generators take.
std::size_t bytes_of_positions() noexcept;

}  // namespace rekindle
