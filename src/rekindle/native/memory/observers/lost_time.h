// Measures the time that a budget costs: choosing storages, evicting and recomputing them.
#pragma once

#include <utility>

#include "../../base/clock.h"
#include "../../base/types.h"

namespace rekindle {

// Adds up the time of scopes. Scopes may nest, in one thread or in several; time that two of them
// share counts once. The caller holds the session mutex, which the work in a scope may release
// meanwhile.
class LostTime final {
public:
    // Run `work`, and add its duration to the total.
    template <class F>
    void add(F&& work) {
        if (depth_++ == 0) {
            since_ = now_ns();
        }
        try {
            std::forward<F>(work)();
        } catch (...) {
            leave();
            throw;
        }
        leave();
    }

    Nanoseconds total() const noexcept { return total_; }

private:
    // End a scope. The clock keeps running if another scope is open, because another thread may
    // have entered one while the session mutex was released.
    void leave() {
        if (--depth_ == 0) {
            total_ += now_ns() - since_;
        }
    }

    Nanoseconds total_ = 0;
    int depth_ = 0;          // number of scopes that are open
    Nanoseconds since_ = 0;  // start of the outermost open scope
};

}  // namespace rekindle
