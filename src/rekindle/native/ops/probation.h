// Decides by trials whether an operator is recomputed that is not PyTorch's own, or whose second
// run may give other bits than its first. Decisions are per signature: an operator with the shapes
// and dtypes of its tensors and its other arguments. The results of calls with one signature are
// not evicted until a trial with this signature gave equal bits.
//
// A trial recomputes an operator call while its first results are still in memory, and compares the
// results. If the bits are equal, the signature is trusted: from then on results of calls with this
// signature may be evicted. If the bits differ, or the call has side effects, results of such calls
// are never evicted. The settings that choose kernels are part of every signature, so a trial is
// valid only for the settings at that time.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace rekindle {

// State of the trials of one signature. The caller holds the session mutex.
class Probation final {
public:
    bool is_trusted() const noexcept { return state_ == State::trusted; }

    bool is_kept() const noexcept { return state_ == State::kept; }

    // Return the reason why results of calls with this signature are never evicted. Empty if they
    // may be evicted, or if a trial is still to come.
    const std::string& why() const noexcept { return why_; }

    // Return true for the first call with this signature that may be tried. Called once per call.
    bool is_new() noexcept { return std::exchange(is_new_, false); }

    // Return true if calls with this signature read or write memory that is not among their
    // arguments. Each call is watched then, although no result of it is recomputed.
    bool is_watched() const noexcept { return watched_; }

    // Return true if these calls write an argument in a way that no operator shows.
    bool writes() const noexcept { return writes_; }

    // Return true if the current call should run a second time as a trial. Called only while the
    // signature is neither trusted nor excluded. After a trial for which the budget had no room,
    // some calls are skipped.
    bool is_due() noexcept {
        if (waits_ > 0) {
            --waits_;
            return false;
        }
        return true;
    }

    // Leave out the next call.
    void skip_one() noexcept { waits_ = 1; }

    // Record that a trial gave equal bits. After `enough` such trials, the signature is trusted.
    void passed(int enough) noexcept {
        ++equal_;
        state_ = equal_ >= enough ? State::trusted : State::open;
    }

    void failed(std::string why) {
        state_ = State::kept;
        why_ = std::move(why);
    }

    // Record that each call is to be watched. `writes`: it writes an argument in a way that no
    // operator shows.
    void watch(bool writes) noexcept {
        watched_ = true;
        writes_ = writes_ || writes;
    }

    // Let calls with this signature be tried again, unless they are trusted.
    void reopen() {
        if (!is_trusted()) {
            *this = Probation();
        }
    }

    // Record that the budget had no room for a trial. Each time, twice as many calls are skipped as
    // the last time, up to 64.
    void postponed() noexcept {
        constexpr int most = 64;
        pause_ = pause_ < most ? 2 * pause_ : most;
        waits_ = pause_;
    }

private:
    enum class State : std::uint8_t { open, trusted, kept };

    State state_ = State::open;
    bool watched_ = false;
    bool writes_ = false;
    bool is_new_ = true;
    int equal_ = 0;
    int waits_ = 0;
    int pause_ = 1;
    std::string why_;
};

}  // namespace rekindle
