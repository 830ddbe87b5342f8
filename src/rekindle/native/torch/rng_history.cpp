#include "rng_history.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>
#include <utility>

namespace rekindle {

namespace {

// Most turns that a search for a generator's state tries, and that one stretch (run of turns) may
// have. A turn computes the next 624 words of the Mersenne twister. To try so many turns takes some
// 20 microseconds.
constexpr int MOST = 64;
// After a failed search, each of this many states begins a new stretch without a search.
constexpr int PAUSE = 8;
constexpr std::size_t FOLLOWED = 4;  // number of stretches that a search tries

std::atomic<std::size_t> bytes_kept = 0;

// Return the word of the Mersenne twister that replaces `word` in the next turn. `after` is the
// word that follows it, `ahead` the word 397 positions later.
std::uint32_t turned(std::uint32_t word, std::uint32_t after, std::uint32_t ahead) noexcept {
    const std::uint32_t mixed = (word & 0x80000000U) | (after & 0x7FFFFFFFU);
    return ahead ^ (mixed >> 1) ^ (-(mixed & 1) & 0x9908B0DFU);
}

// Compute the generator's next words from the current ones (Matsumoto and Nishimura 1998). The
// loops are split where positions wrap around, so that the compiler vectorizes them.
void turn(MtWords& words) noexcept {
    constexpr std::size_t n = std::tuple_size_v<MtWords>;
    constexpr std::size_t distance = 397;
    constexpr std::size_t wraps = n - distance;
    for (std::size_t i = 0; i < wraps; ++i) {
        words[i] = turned(words[i], words[i + 1], words[i + distance]);
    }
    for (std::size_t i = wraps; i < n - 1; ++i) {
        words[i] = turned(words[i], words[i + 1], words[i - wraps]);
    }
    words[n - 1] = turned(words[n - 1], words[0], words[distance - 1]);
}

// Advance `words` turn by turn until they equal `later`, and return the number of turns. Return
// nothing if `most` turns do not suffice.
std::optional<int> turns_between(MtWords& words, const MtWords& later, int most) noexcept {
    for (int turns = 0;; ++turns) {
        if (words == later) {
            return turns;
        }
        if (turns == most) {
            return {};
        }
        turn(words);
    }
}

// Return the first words of a Mersenne twister with the given seed.
MtWords words_of(std::uint64_t seed) {
    return at::mt19937(seed).data().state_;
}

}  // namespace

MtBlock::MtBlock(const MtWords& there) : words_(std::make_unique<const MtWords>(there)) {
    bytes_kept.fetch_add(nbytes(), std::memory_order_relaxed);
}

MtBlock::MtBlock(std::uint64_t seed) : seed_(seed) {
    bytes_kept.fetch_add(nbytes(), std::memory_order_relaxed);
}

MtBlock::~MtBlock() {
    bytes_kept.fetch_sub(nbytes(), std::memory_order_relaxed);
}

std::size_t MtBlock::nbytes() const noexcept {
    return sizeof(MtBlock) + (words_ ? sizeof(MtWords) : 0);
}

MtWords MtBlock::words() const {
    return words_ ? *words_ : words_of(seed_);
}

RngCheckpoint::RngCheckpoint(const Random& there, c10::intrusive_ptr<MtBlock> start, int turns)
    : generator_(there.generator()),
      around_(there.around()),
      start_(std::move(start)),
      turns_(turns) {
    bytes_kept.fetch_add(sizeof(RngCheckpoint), std::memory_order_relaxed);
}

RngCheckpoint::RngCheckpoint(at::Generator generator, const PhiloxState& there)
    : generator_(std::move(generator)), philox_(there) {
    bytes_kept.fetch_add(sizeof(RngCheckpoint), std::memory_order_relaxed);
}

RngCheckpoint::~RngCheckpoint() {
    bytes_kept.fetch_sub(sizeof(RngCheckpoint), std::memory_order_relaxed);
}

at::Generator RngCheckpoint::copy() const {
    const at::Generator made =
        is_on_device() ? generator_.clone() : at::detail::createCPUGenerator();
    restore_to(made);
    return made;
}

void RngCheckpoint::restore_to(const at::Generator& generator) const {
    if (is_on_device()) {
        philox_.restore(generator);
        return;
    }
    MtWords words = start_->words();
    for (int i = 0; i < turns_; ++i) {
        turn(words);
    }
    Random(generator, around_, words).restore();
}

std::unique_ptr<RngCheckpoint> RngHistory::note(const at::Generator& generator) {
    if (!generator.device().is_cpu()) {
        return std::make_unique<RngCheckpoint>(generator, PhiloxState::of(generator));
    }
    const Random there(generator);
    const Stretch& stretch = stretch_at(there);
    return std::make_unique<RngCheckpoint>(there, stretch.start, stretch.turns);
}

// Return the stretch (run of consecutive turns) that contains the generator state `there`. If there
// is none, begin one.
const RngHistory::Stretch& RngHistory::stretch_at(const Random& there) {
    const MtWords& words = there.words();
    const c10::GeneratorImpl* generator = there.generator().unsafeGetGeneratorImpl();
    auto found =
        std::ranges::find_if(stretches_, [&](const Stretch& each) { return each.now == words; });
    if (found == stretches_.end()) {
        found = std::ranges::find_if(stretches_, [&](const Stretch& each) {
            return each.generator._unsafe_get_target() == generator;
        });
        if (found != stretches_.end() && !reach(*found, words)) {
            found = stretches_.end();
        }
    }
    if (found == stretches_.end()) {
        if (stretches_.size() == FOLLOWED) {
            stretches_.pop_back();
        }
        found = stretches_.insert(stretches_.end(), begin(there));
    }
    std::rotate(stretches_.begin(), found, found + 1);
    return stretches_.front();
}

// Advance `stretch` turn by turn until its words equal `words`. Return false if the turns tried do
// not reach `words`. If they do, but the stretch would become too long, begin a new one at `words`.
bool RngHistory::reach(Stretch& stretch, const MtWords& words) {
    if (pause_ != 0) {
        --pause_;
        return false;
    }
    MtWords now = stretch.now;
    const std::optional<int> turns = turns_between(now, words, MOST);
    if (!turns) {
        pause_ = stretch.turns != 0 ? 0 : PAUSE;
        return false;
    }
    stretch.now = words;
    stretch.turns += *turns;
    if (stretch.turns > MOST) {
        stretch.start = c10::make_intrusive<MtBlock>(words);
        stretch.turns = 0;
    }
    return true;
}

// Begin a stretch: at the words that follow from the seed of `there` if these are few turns away,
// otherwise at the state `there`.
RngHistory::Stretch RngHistory::begin(const Random& there) const {
    using Generator = c10::weak_intrusive_ptr<c10::GeneratorImpl>;
    const std::uint64_t seed = there.around().seed;
    MtWords first = words_of(seed);
    const std::optional<int> turns = turns_between(first, there.words(), pause_ == 0 ? MOST : 0);
    return {
        Generator(there.generator().getIntrusivePtr()),
        turns ? c10::make_intrusive<MtBlock>(seed) : c10::make_intrusive<MtBlock>(there.words()),
        there.words(),
        turns.value_or(0)
    };
}

std::size_t bytes_of_positions() noexcept {
    return bytes_kept.load(std::memory_order_relaxed);
}

}  // namespace rekindle
