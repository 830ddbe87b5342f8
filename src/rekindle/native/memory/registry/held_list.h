// The list of records with a recipe whose storages variables of the program may hold (R1,
// ownership).
//
// A part adds a record when its storage is made or restored, and removes it when the storage is
// evicted or when polling finds that the program no longer holds it. The list is linked through the
// records, so that both take constant time.
#pragma once

#include <utility>

#include "../records/storage_record.h"

namespace rekindle {

// A list of records, the oldest first. A record is linked exactly while `maybe_held` is set. The
// caller holds the session mutex.
class HeldList final {
public:
    // Append `record`, unless it is in the list already.
    void add(StorageRecord& record) noexcept {
        if (record.maybe_held) {
            return;
        }
        record.maybe_held = true;
        record.held_before = last_;
        (last_ == nullptr ? first_ : last_->held_after) = &record;
        last_ = &record;
    }

    // Remove `record`, if it is in the list.
    void remove(StorageRecord& record) noexcept {
        if (!record.maybe_held) [[likely]] {
            return;
        }
        record.maybe_held = false;
        StorageRecord* before = std::exchange(record.held_before, nullptr);
        StorageRecord* after = std::exchange(record.held_after, nullptr);
        (before == nullptr ? first_ : before->held_after) = after;
        (after == nullptr ? last_ : after->held_before) = before;
    }

    // Call `visit(record)` for each record. `visit` may remove that record.
    template <class F>
    void each(F&& visit) const {
        for (StorageRecord* record = first_; record != nullptr;) {
            StorageRecord* next = record->held_after;
            visit(*record);
            record = next;
        }
    }

private:
    StorageRecord* first_ = nullptr;
    StorageRecord* last_ = nullptr;
};

}  // namespace rekindle
