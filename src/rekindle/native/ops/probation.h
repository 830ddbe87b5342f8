// Whether calls of one signature may be run again, where it is not certain that they give the same
// bits: each is kept until a trial has shown that they do.
//
// A trial recomputes a call beside its first results. Equal bits: from then on the signature is
// trusted, and its results may be evicted. Different bits, or effects beside the results: it is
// kept for good. The switches that choose kernels are part of every signature, so what a trial
// showed holds for the switches as they stood then.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace rekindle {

// What is known of one signature. Not without the core's lock.
class Probation final {
public:
    bool is_trusted() const noexcept { return state_ == State::trusted; }

    bool is_kept() const noexcept { return state_ == State::kept; }

    // Why it is kept; empty: it is not, or a trial is still to come.
    const std::string& why() const noexcept { return why_; }

    // A call comes that is neither trusted nor kept. Returns whether it should be tried: not each
    // one of many, where there was no room for a trial before.
    bool is_due() noexcept {
        if (waits_ > 0) {
            --waits_;
            return false;
        }
        return true;
    }

    // A call gave the same bits again, which `enough` of them have to.
    void passed(int enough) noexcept {
        ++equal_;
        state_ = equal_ >= enough ? State::trusted : State::open;
    }

    void failed(std::string why) {
        state_ = State::kept;
        why_ = std::move(why);
    }

    // There was no room for a trial.
    void postponed() noexcept {
        constexpr int most = 64;
        pause_ = pause_ < most ? 2 * pause_ : most;
        waits_ = pause_;
    }

private:
    enum class State : std::uint8_t { open, trusted, kept };

    State state_ = State::open;
    int equal_ = 0;
    int waits_ = 0;
    int pause_ = 1;
    std::string why_;
};

}  // namespace rekindle
