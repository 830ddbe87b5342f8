// Evicts user-held values like all others (`evict="anything"`).
//
// NOTE [Evicting user-held values at any time]
//
// Rationale: tensors, views and storage objects of the program share one storage. To evict it, the
// runtime exchanges its memory for none: the storage becomes a placeholder (`placeholder`). The
// tensors stay valid Python objects, and an access to their memory raises. Code that is about to
// read announces it first (`PinnedOperands`, `lock_there`); the value is then recomputed and put
// back into the same storage.
//
// Values of dtype int32 or int64 are never evicted, because they may be lengths or indices.
// Composite functions such as `tensor_split` and `pad_packed_sequence` read those directly, before
// any of their operators runs.
//
// Threads: the session mutex is free while an operator runs. Its operands are locked in the engine
// meanwhile, and a value that autograd unpacked belongs to the node that its thread is evaluating.
//
// Scenario: an evaluation loop under `no_grad` keeps all outputs in a list. They are evicted as
// soon as memory is short, and recomputed when the program prints one.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "../base/mutex.h"
#include "driver.h"

namespace rekindle {

// Storages that are locked in the engine because they are being read.
using Kept = c10::SmallVector<Ref<Storage>, 6>;

// Eviction of user-held values for one driver. Every member needs the session mutex.
class HeldEviction final {
public:
    explicit HeldEviction(Driver& driver) : driver_(driver) {}

    HeldEviction(const HeldEviction&) = delete;
    HeldEviction& operator=(const HeldEviction&) = delete;
    HeldEviction(HeldEviction&&) = delete;
    HeldEviction& operator=(HeldEviction&&) = delete;
    ~HeldEviction() = default;

    // Return true if `tensor`, a result of an operator, may be evicted while the program holds it.
    static bool is_returnable(const c10::TensorImpl& tensor);

    bool open = true;  // false once the budget is over
    // Number of reasons not to record recipes for values made with grad mode off.
    int unrecorded = 0;

    bool records_without_grad() const noexcept { return open && unrecorded == 0; }

    // Restore and lock all storages in `storages`, and add them to `kept`. After an exception
    // `kept` still lists the storages that are locked.
    void bring(const StorageList& storages, Kept& kept, Locked& lock);
    // Unlock all storages in `kept`. Static, because `driver` may have lost its `HeldEviction`
    // meanwhile.
    static void done(Driver& driver, Kept& kept);
    // Restore and lock all storages in `storages` until `unlock_there` is called with the returned
    // number.
    std::int64_t lock_there(const StorageList& storages, Locked& lock);
    void unlock_there(std::int64_t number);
    // Make `record`, which an operator of the program made or wrote, a candidate for eviction.
    void made(StorageRecord& record);
    // Keep `record` resident while the current autograd node runs: its kernels may read it unseen.
    void pin_while_held(StorageRecord& record);

    // Stop evicting user-held values: an operator begins that may read any of them.
    void stops() { pause(true); }

    // Prepare for an eviction. If threads run that are not known to the runtime, user-held values
    // are excluded. Releases the lock for a moment.
    void about_to_let_go(Locked& lock);
    // After an operator with grad mode off: release sources if too many are kept only for recipes.
    void look_at_sources(Locked& lock);
    // Release sources kept only to recompute other values, after restoring those. Return true if
    // memory was freed.
    bool give_up_sources();

    // Run `step`. If it does not fit, release such sources and run it once more.
    template <class Step>
    void attempt(Step&& step) {
        std::optional<OutOfBudgetError> shortage = out_of_budget_of(step);
        if (!shortage) {
            return;
        }
        if (!open || !give_up_sources()) {
            throw OutOfBudgetError(*std::move(shortage));
        }
        step();
    }

    // Shut down in two steps: `close` before all placeholders are restored, `forget_recipes` after.
    void close();
    void forget_recipes();

private:
    // A value that was made or used in a backward pass, and the thread of that pass.
    struct Worked final {
        std::thread::id thread;
        Ref<Storage> storage;
    };

    // A saved value that autograd unpacked for `node`, which one thread evaluates.
    struct Unpacked final {
        std::thread::id thread;
        const void* node;
        Ref<Storage> storage;
    };

    bool may_go_now(const StorageRecord& record) const noexcept;
    void node_changes();
    void work_with(StorageRecord& record);
    static bool is_over(const Worked& worked);
    bool is_any_over() const;
    void keep_what_is_left();
    void pause(bool pause);
    bool exceeds_chain_limit(StorageRecord& record) const;
    std::vector<Ref<Storage>> dead_sources();

    static constexpr int OPERATORS_BETWEEN_LOOKS = 16;

    Driver& driver_;
    std::vector<Unpacked> unpacked_;      // for the node that autograd evaluates now
    std::vector<Worked> worked_with_;     // made or used in a backward pass that still runs
    std::map<std::int64_t, Kept> there_;  // read by functions of the program that run now
    std::int64_t numbers_ = 0;
    int until_look_ = OPERATORS_BETWEEN_LOOKS;  // operators until `look_at_sources` looks
    bool paused_ = false;  // user-held values are excluded from eviction for now
};

// Scope in which the storages in `storages` are restored and locked, until `end`, or until the
// destructor runs because of an exception. It must not outlive the lock or the driver.
class PinnedOperands final {
public:
    PinnedOperands(Driver& driver, const StorageList& storages, Locked& lock);
    PinnedOperands(const PinnedOperands&) = delete;
    PinnedOperands& operator=(const PinnedOperands&) = delete;
    PinnedOperands(PinnedOperands&&) = delete;
    PinnedOperands& operator=(PinnedOperands&&) = delete;
    ~PinnedOperands();

    void end();

private:
    Driver& driver_;
    Kept kept_;
};

// Prepare for an eviction, which may include user-held values.
inline void about_to_let_go(Driver& driver, Locked& lock) {
    if (driver.held_eviction && driver.held_eviction->open) {
        driver.held_eviction->about_to_let_go(lock);
    }
}

}  // namespace rekindle
