// Frees that the registry knows of and has not reported to the engine yet.
//
// Frees become known at any time, for example in the middle of an action of the engine. They are
// reported between two events of the program (`Frees::process_pending`).
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "../../base/ref.h"
#include "../../base/types.h"
#include "../../torch/free_queue.h"
#include "../records/storage_record.h"

namespace rekindle {

// Memory and handles that were freed, by kind. Empty after `Frees::process_pending` has reported
// them to the engine. The caller holds the session mutex.
struct PendingFrees final {
    std::vector<const void*> addresses;   // buffer of `Registry::drain`
    std::vector<StorageRecord*> handles;  // records whose autograd handle was destroyed
    std::vector<Ref<Storage>> storages;   // storages whose memory was freed
    // User-held values that were restored into the program's own storage. The registry still holds
    // a reference to that storage, which `hand_back` releases.
    std::vector<Ref<Storage>> restored;
    Bytes counted = 0;  // freed bytes of storages that have no record
    // Polling found storages that the program freed, and the device's allocator was not queried
    // since.
    bool found_by_polling = false;

    // Return true if there is freed memory that the engine still counts, or another change to
    // report to the engine.
    bool any() const noexcept {
        return !handles.empty() || !storages.empty() || !restored.empty() || counted != 0;
    }

    // Return true if some freed memory belonged to a value that is locked in the engine.
    bool any_locked() const noexcept {
        return std::ranges::any_of(storages, [](const Ref<Storage>& each) {
            return each->locks != 0;
        });
    }

    // Move all freed addresses and destroyed handles of `queue` into `addresses` and `handles`.
    void take(FreeQueue& queue) { queue.take(addresses, handles); }

    void clear() noexcept {
        storages.clear();
        restored.clear();
    }
};

}  // namespace rekindle
