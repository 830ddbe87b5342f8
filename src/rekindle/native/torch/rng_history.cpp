#include "rng_history.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace rekindle {

namespace {

// Turns that are tried before giving up; all together take some tens of microseconds.
constexpr int MOST = 64;
constexpr int PAUSE = 8;  // Number of calls after a failure in which no stretch is followed.
constexpr std::size_t FOLLOWED = 4;  // Number of stretches that are followed at a time.

std::atomic<std::size_t> bytes_kept = 0;

// Compute the generator's next words from the current ones (Matsumoto and Nishimura 1998).
void turn(MtWords& words) noexcept {
    constexpr std::size_t distance = 397;
    const std::size_t n = words.size();
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t low = words[i + 1 < n ? i + 1 : 0];
        const std::uint32_t mixed = (words[i] & 0x80000000U) | (low & 0x7FFFFFFFU);
        const std::uint32_t ahead = words[i + distance < n ? i + distance : i + distance - n];
        words[i] = ahead ^ (mixed >> 1) ^ ((mixed & 1) != 0 ? 0x9908B0DFU : 0);
    }
}

// Return the generator's first words for a seed.
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

void RngCheckpoint::restore() const {
    if (on_device() != nullptr) {
        philox_.restore(generator_);
        return;
    }
    MtWords words = start_->words();
    for (int i = 0; i < turns_; ++i) {
        turn(words);
    }
    Random(generator_, around_, words).restore();
}

std::unique_ptr<RngCheckpoint> RngHistory::note(const at::Generator& generator) {
    if (!generator.device().is_cpu()) {
        return std::make_unique<RngCheckpoint>(generator, PhiloxState::of(generator));
    }
    const Random there(generator);
    const Stretch& stretch = stretch_at(there);
    return std::make_unique<RngCheckpoint>(there, stretch.start, stretch.turns);
}

// Return the stretch that contains the state `there`. If there is none, begin one.
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

// Advance `stretch` to `words`. Return false if the next turns of the stretch do not reach `words`.
bool RngHistory::reach(Stretch& stretch, const MtWords& words) {
    if (pause_ != 0) {
        --pause_;
        return false;
    }
    MtWords now = stretch.now;
    for (int turns = stretch.turns + 1; turns <= MOST; ++turns) {
        turn(now);
        if (now == words) {
            stretch.now = words;
            stretch.turns = turns;
            return true;
        }
    }
    pause_ = stretch.turns != 0 ? 0 : PAUSE;
    return false;
}

// Begin a stretch at the seed of `there` if that is few turns away, otherwise at `there`.
RngHistory::Stretch RngHistory::begin(const Random& there) const {
    using Generator = c10::weak_intrusive_ptr<c10::GeneratorImpl>;
    Stretch made{Generator(there.generator().getIntrusivePtr()), {}, there.words(), 0};
    const std::uint64_t seed = there.around().seed;
    MtWords words = words_of(seed);
    const int most = pause_ == 0 ? MOST : 0;
    while (words != made.now && made.turns < most) {
        turn(words);
        ++made.turns;
    }
    if (words == made.now) {
        made.start = c10::make_intrusive<MtBlock>(seed);
    } else {
        made.start = c10::make_intrusive<MtBlock>(made.now);
        made.turns = 0;
    }
    return made;
}

std::size_t bytes_of_positions() noexcept {
    return bytes_kept.load(std::memory_order_relaxed);
}

}  // namespace rekindle
