// Counts of what runs within the budget now, in all threads of the program.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "../records/storage_record.h"

namespace rekindle {

// The values that the program's variables hold, while other code may read any of them. Implemented
// in held.h.
class HeldValues {
public:
    HeldValues() = default;
    HeldValues(const HeldValues&) = delete;
    HeldValues& operator=(const HeldValues&) = delete;

    // Exclude all user-held values from eviction. An operator is about to begin that may read any
    // of them.
    virtual void stop_evicting_held() = 0;
    // Allow their eviction again, except of those that are being read.
    virtual void go_on() = 0;

protected:
    ~HeldValues() = default;
};

// Scope in which the counter `count` is one higher.
class ScopedCount final {
public:
    explicit ScopedCount(int& count) noexcept : count_(++count) {}

    ScopedCount(const ScopedCount&) = delete;
    ScopedCount& operator=(const ScopedCount&) = delete;

    ~ScopedCount() { --count_; }

private:
    int& count_;
};

// How many operators run now, by kind. Scopes change the counts: `Running` (dispatch/running.h) for
// an operator of the program, `Recomputing` (memory/recomputer/recomputing.h) for a recomputed one,
// `Effects` for one whose side effects are observed. The caller holds the session mutex.
struct InProgress final {
    int operators = 0;          // operators that run now, recomputed ones included
    std::uint64_t started = 0;  // operators started so far
    int recomputations = 0;     // recomputations that run now
    // running operators that may read any memory of the program, not only their operands
    int reading_anything = 0;
    int observed = 0;            // running operators whose side effects are observed (`Effects`)
    HeldValues* held = nullptr;  // told of operators that read anything; set once
    // Records that operators in slices are about to read. The engine's graph does not know of these
    // operators yet.
    std::vector<const StorageRecord*> awaited;
    // With evict="anything": memory that operators of the program, and other readers, use now.
    std::vector<const c10::StorageImpl*> operands;

    // Return true if a reader uses the memory of `record`.
    bool uses(const StorageRecord& record) const {
        if (operands.empty()) [[likely]] {
            return false;
        }
        const StoragePtr storage_impl = record.at();
        return storage_impl && std::ranges::find(operands, storage_impl.get()) != operands.end();
    }

    // Remove `storages`, which were added to `operands`.
    void release(std::span<const c10::StorageImpl* const> storages) {
        for (const c10::StorageImpl* each : storages) {
            operands.erase(std::ranges::find(operands, each));
        }
    }

    // Return true if an operator in slices is about to read `record`.
    bool awaits(const StorageRecord& record) const noexcept {
        return std::ranges::find(awaited, &record) != awaited.end();
    }

    // Return true if a recomputation or an operator in slices may read `record`.
    bool may_read(const StorageRecord& record) const noexcept {
        return record.consumed() || awaits(record);
    }
};

}  // namespace rekindle
