// A device that has less memory than the budget says: how much less, as far as it has shown.
//
// What others took meanwhile, what operators take inside themselves, what lies in pieces: no budget
// counts that. An allocation that failed would fail again at the next operator, so from then on the
// budget is what fitted. Memory in pieces is no number, though: where the program cannot do with
// that, the budget is what it was given again.
#pragma once

#include <algorithm>
#include <utility>

#include "../base/types.h"

namespace rekindle {

class Shortfall final {
public:
    // How often the device had less than the budget says.
    int times() const noexcept { return times_; }

    // How often no place among neighbors in memory helped.
    int by_sum() const noexcept { return by_sum_; }

    // What to evict at first, of `memory`, for an operator that needs so much and did not get it.
    Bytes step(Bytes needed, Bytes memory) noexcept {
        const Bytes half = memory / 2;
        ++by_sum_;
        const Bytes least = std::max<Bytes>(needed, 1);
        const int doubled = std::min(by_sum_, 30);
        return least > half >> doubled ? half : least << doubled;
    }

    // So much did fit, and is the `budget` from now on, as long as the program can do with it.
    void fitted(Bytes nbytes, Bytes& budget) noexcept {
        ++times_;
        if (lowers && !insists_ && nbytes < budget) {
            lowered_ += budget - nbytes;
            budget = nbytes;
        }
    }

    // The program cannot: the `budget` is what it was given. Returns whether it was less.
    bool as_given(Bytes& budget) noexcept {
        const Bytes less = std::exchange(lowered_, 0);
        budget += less;
        return less > 0;
    }

    // The program was given another budget.
    void forget() noexcept { lowered_ = 0; }

    // Until its end what was begun anew is brought to its own: the budget gets no less, or it might
    // be begun anew for ever.
    class Insisting final {
    public:
        explicit Insisting(Shortfall& of) noexcept
            : of_(of), before_(std::exchange(of.insists_, true)) {}

        Insisting(const Insisting&) = delete;
        Insisting& operator=(const Insisting&) = delete;
        Insisting(Insisting&&) = delete;
        Insisting& operator=(Insisting&&) = delete;

        ~Insisting() { of_.insists_ = before_; }

    private:
        Shortfall& of_;
        const bool before_;
    };

    bool lowers = true;  // off in a test that shows what it is for

private:
    int times_ = 0;
    int by_sum_ = 0;
    Bytes lowered_ = 0;
    bool insists_ = false;
};

}  // namespace rekindle
