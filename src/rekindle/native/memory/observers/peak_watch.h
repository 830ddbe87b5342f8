// Decides when memory in use has exceeded the last recorded peak by so much that the snapshot of
// the peak (a list of the storages in memory) must be taken again.
#pragma once

#include <algorithm>
#include <limits>

#include "../../base/types.h"
#include "snapshot.h"

namespace rekindle {

// Decides when to take a snapshot of the highest memory so far. A snapshot visits every storage, so
// it is only taken again once memory is clearly higher than at the last one. The caller holds the
// session mutex.
class PeakWatch final {
public:
    Snapshot snapshot;
    // memory in use has passed the threshold: Python should take a snapshot of the storages in
    // memory
    bool due = false;

    // Record that `memory` bytes are in use now.
    void look(Bytes memory) noexcept { due = due || memory > threshold_; }

    // Return true if the last snapshot of the storages in memory does not describe a peak of
    // `memory` bytes.
    bool is_outdated(Bytes memory) const noexcept { return memory > threshold_; }

    // Record that a snapshot of the storages in memory was taken at `memory` bytes.
    void taken(Bytes memory) noexcept {
        const Bytes clearly_more = memory + memory / 50;
        threshold_ = std::max(memory, std::min(clearly_more, exact_from_ - 1));
    }

    // Regard the snapshot of the storages in memory as outdated now, and at each new peak of
    // `nbytes` or more.
    void expect(Bytes nbytes) noexcept {
        exact_from_ = nbytes;
        threshold_ = -1;
    }

private:
    Bytes threshold_ = 0;
    // From this number of bytes on, every new peak of memory needs a snapshot.
    Bytes exact_from_ = std::numeric_limits<Bytes>::max();
};

}  // namespace rekindle
