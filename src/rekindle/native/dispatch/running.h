// Marks the time in which an operator of the program runs.
#pragma once

#include "../memory/session.h"

namespace rekindle {

// Scope in which an operator of the program runs. Meanwhile `nbytes`, its results and its
// workspace, count as memory in use. If `reads_anything`, the operator may read any memory of the
// program, so user-held values are not evicted in this scope. The session mutex is held where the
// scope begins and where it ends.
class Running final {
public:
    Running(Session& session, Bytes nbytes, bool reads_anything)
        : session_(session), nbytes_(nbytes), reads_anything_(reads_anything) {
        session_.engine.in_flight += nbytes_;
        ++session_.in_progress.operators;
        if (reads_anything_) [[unlikely]] {
            ++session_.in_progress.reading_anything;
            if (session_.held.evicts() || session_.in_progress.recomputations != 0) {
                session_.held.stop_evicting_held();
            }
        }
    }

    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
    Running(Running&&) = delete;
    Running& operator=(Running&&) = delete;

    ~Running() {
        session_.engine.in_flight -= nbytes_;
        --session_.in_progress.operators;
        if (reads_anything_) [[unlikely]] {
            --session_.in_progress.reading_anything;
        }
    }

private:
    Session& session_;
    const Bytes nbytes_;
    const bool reads_anything_;
};

}  // namespace rekindle
