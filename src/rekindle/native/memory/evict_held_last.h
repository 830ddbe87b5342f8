// Evicts user-held values (values that variables of the program refer to) as a last resort
// (`evict="auto"`).
//
// NOTE [Evicting user-held values as a last resort]
//
// Rationale: values that the program's variables refer to are evicted only where the alternative is
// `OutOfBudget`. A request that does not fit is tried a second time. During the second try
// user-held values are candidates for eviction.
//
// Values that are being read are not candidates: the operands of running operators (`Reader`), and
// the tensors that rekindle.pytorch.held reports as read by the program's own functions. Only
// floating-point values made by operators are candidates, because Python code reads integers and
// single numbers directly.
//
// Scenario: a list keeps every hidden state of a recurrent network. All values that only autograd
// holds are evicted, and the next operator still does not fit. The operator is retried, hidden
// states of the list are evicted, and a later access recomputes them.
//
// With `evict="anything"` user-held values are always candidates; see `held_eviction.h`.
#pragma once

#include <c10/util/SmallVector.h>

#include <optional>
#include <utility>

#include "../base/mutex.h"
#include "../torch/geometry.h"
#include "driver.h"
#include "held_eviction.h"
#include "program.h"

namespace rekindle {

// Return true if `tensor`, a result of an operator, may be evicted while the program holds it: a
// floating-point value that Python code does not read directly.
bool is_returnable(const c10::TensorImpl& tensor);
// Return true if the value of `record` may be evicted while the program holds it, unless it is
// being read.
bool may_return(const StorageRecord& record) noexcept;

// Scope in which user-held values may be evicted, except those that are being read. The scope must
// end while its thread still holds the session mutex, and before the driver is destroyed.
class EvictHeldLast final {
public:
    explicit EvictHeldLast(Driver& driver);
    EvictHeldLast(const EvictHeldLast&) = delete;
    EvictHeldLast& operator=(const EvictHeldLast&) = delete;
    EvictHeldLast(EvictHeldLast&&) = delete;
    EvictHeldLast& operator=(EvictHeldLast&&) = delete;
    ~EvictHeldLast();

    // Make user-held values candidates for eviction again, except those that are being read. Called
    // after an operator that may read any user-held value.
    void go_on();

private:
    Driver& driver_;
    std::vector<Ref<Storage>> candidates_;
};

// Scope in which the storages in `storages` are being read, so that they are not evicted. The
// session mutex is held where the scope begins and where it ends.
class Reading final : public Reader {
public:
    // saved: true if values that autograd saved may be read as well.
    Reading(Driver& driver, StorageList storages, bool saved = false);
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    Reading(Reading&&) = delete;
    Reading& operator=(Reading&&) = delete;
    ~Reading() override;

    void note_read(StorageList& read) const override {
        read.append(storages_.begin(), storages_.end());
    }

    bool reads_saved() const override { return saved_; }

private:
    Driver& driver_;
    const StorageList storages_;
    const bool saved_;
};

// Run `step` while user-held values may be evicted, except those that are being read. The caller
// has registered its own operands as a `Reader`. Releases the session mutex for a moment. Return
// false, without running `step`, if no user-held value may be evicted now.
template <class Step>
bool with_held_evictable(Driver& driver, Locked& lock, Step&& step) {
    if (!driver.evicts_held_last) {
        return false;
    }
    bool known = false;
    {
        const Unlocked others(lock);
        known = all_threads_are_known(driver);
    }
    driver.registry.drain();
    if (!known || !driver.evicts_held_last || driver.in_progress.reading_anything != 0) {
        return false;
    }
    const EvictHeldLast resort(driver);
    step();
    return true;
}

// Run `step`. If it does not fit into the budget, move the backup copies (those that could undo the
// running optimizer step) out of the budget's memory, and run `step` once more. Releases the
// session mutex for that move.
template <class Step>
void or_without_copies(Driver& driver, Locked& lock, Step&& step) {
    std::optional<OutOfBudgetError> shortage = out_of_budget_of(step);
    if (!shortage) {
        return;
    }
    bool moved = false;
    // true if the running optimizer step can be undone, so that there are backup copies
    if (driver.observers.due.tell_ranges) {
        const Unlocked others(lock);
        moved = move_copies_out(driver);
    }
    if (!moved) {
        driver.registry.drain();
        throw OutOfBudgetError(*std::move(shortage));
    }
    driver.frees.process_pending();
    step();
}

// Run `step`. If it does not fit into the budget, run it once more while user-held values may be
// evicted.
template <class Step>
void retry_evicting_held(Driver& driver, Locked& lock, Step&& step) {
    or_without_copies(driver, lock, [&] {
        // with `evict="anything"`, user-held values are candidates already, so a second try would
        // not help
        if (driver.held_eviction) [[unlikely]] {
            about_to_let_go(driver, lock);
            driver.held_eviction->attempt(step);
            return;
        }
        std::optional<OutOfBudgetError> shortage = out_of_budget_of(step);
        if (!shortage) [[likely]] {
            return;
        }
        if (!with_held_evictable(driver, lock, step)) {
            throw OutOfBudgetError(*std::move(shortage));
        }
    });
}

// Restore the contents of `tensor`, if they were evicted while the program held the tensor.
inline void bring_back(Driver& driver, Locked& lock, const c10::TensorImpl& tensor) {
    if (driver.registry.placeholders != 0 && has_memory(tensor)) [[unlikely]] {
        c10::StorageImpl& storage_impl = *tensor.unsafe_storage().unsafeGetStorageImpl();
        if (is_placeholder(storage_impl)) {
            retry_evicting_held(driver, lock, [&] { driver.room.bring_back(storage_impl); });
        }
    }
}

// Return the record of the storage of `tensor`; null if it has no memory. Register the storage if
// it has no record yet. If it does not fit into the budget otherwise, evict user-held values to
// make room.
inline StorageRecord* find_or_register(
    Driver& driver, Locked& lock, const c10::TensorImpl& tensor
) {
    const AddressEntry* found =
        driver.registry.find(*tensor.unsafe_storage().unsafeGetStorageImpl());
    if (found != nullptr) {
        StorageRecord* known = found->record;
        return known != nullptr && !known->untracked ? known : driver.find_or_register(tensor);
    }
    StorageRecord* record = nullptr;
    retry_evicting_held(driver, lock, [&] { record = driver.find_or_register(tensor); });
    return record;
}

// Take the session mutex, and run `act`, the body of a function that Python calls. Before that,
// process storages and handles that were freed, because `act` may evict values.
template <class F>
auto settled(Driver& driver, F&& act) {
    return translate_errors(driver, [&] {
        Locked lock;
        about_to_let_go(driver, lock);
        driver.frees.process_pending();
        return std::forward<F>(act)(lock);
    });
}

}  // namespace rekindle
