#include "positions.h"

#include <atomic>
#include <utility>

namespace rekindle {

namespace {

constexpr int MOST = 64;  // turns: some tens of microseconds
constexpr int PAUSE = 8;  // after it gave up: positions for which nothing is followed

std::atomic<std::size_t> bytes_kept = 0;

// The words that are made of these once all have been drawn (Matsumoto and Nishimura 1998).
void turn(Words& words) noexcept {
    constexpr std::size_t distance = 397;
    const std::size_t n = words.size();
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t low = words[i + 1 < n ? i + 1 : 0];
        const std::uint32_t mixed = (words[i] & 0x80000000U) | (low & 0x7FFFFFFFU);
        const std::uint32_t ahead = words[i + distance < n ? i + distance : i + distance - n];
        words[i] = ahead ^ (mixed >> 1) ^ ((mixed & 1) != 0 ? 0x9908B0DFU : 0);
    }
}

}  // namespace

Start::Start(const Words& there) : words(there) {
    bytes_kept.fetch_add(sizeof(Start), std::memory_order_relaxed);
}

Start::~Start() {
    bytes_kept.fetch_sub(sizeof(Start), std::memory_order_relaxed);
}

Position::Position(const Random& there, c10::intrusive_ptr<Start> start, int turns)
    : generator_(there.generator()),
      around_(there.around()),
      start_(std::move(start)),
      turns_(turns) {
    bytes_kept.fetch_add(sizeof(Position), std::memory_order_relaxed);
}

Position::Position(at::Generator generator, const Drawn& there)
    : generator_(std::move(generator)), drawn_(there) {
    bytes_kept.fetch_add(sizeof(Position), std::memory_order_relaxed);
}

Position::~Position() {
    bytes_kept.fetch_sub(sizeof(Position), std::memory_order_relaxed);
}

void Position::restore() const {
    if (on_device() != nullptr) {
        drawn_.restore(generator_);
        return;
    }
    Words words = start_->words;
    for (int i = 0; i < turns_; ++i) {
        turn(words);
    }
    Random(generator_, around_, words).restore();
}

std::unique_ptr<Position> Positions::note(const at::Generator& generator) {
    if (!generator.device().is_cpu()) {
        return std::make_unique<Position>(generator, Drawn::of(generator));
    }
    const Random there(generator);
    if (!start_ || (there.words() != now_ && !reach(there.words()))) {
        start_ = c10::make_intrusive<Start>(there.words());
        now_ = there.words();
        turns_ = 0;
    }
    return std::make_unique<Position>(there, start_, turns_);
}

// Whether the program came to `words` on this stretch.
bool Positions::reach(const Words& words) {
    if (pause_ != 0) {
        --pause_;
        return false;
    }
    for (int turns = turns_ + 1; turns <= MOST; ++turns) {
        turn(now_);
        if (now_ == words) {
            turns_ = turns;
            return true;
        }
    }
    pause_ = turns_ != 0 ? 0 : PAUSE;
    return false;
}

std::size_t bytes_of_positions() noexcept {
    return bytes_kept.load(std::memory_order_relaxed);
}

}  // namespace rekindle
