// Evicts user-held values (values that variables of the program refer to) like all others
// (`evict="anything"`).
//
// NOTE [Evicting user-held values at any time]
//
// Rationale: tensors, views and storage objects of the program share one storage. To evict that
// storage, the runtime takes its memory away: the storage becomes a placeholder. The tensors stay
// valid Python objects, and a direct access to their memory raises. Code that is about to read the
// memory announces that first (`PinnedOperands`, `begin_reading`). The runtime then recomputes the
// value into the same storage.
//
// Values of dtype int32 or int64 are never evicted, because they may be lengths or indices.
// Composite functions such as `tensor_split` and `pad_packed_sequence` read such integers directly,
// before any of their operators runs.
//
// With `swap=`, sources (values without a recipe: parameters, gradients, optimizer state, results
// of opaque kernels) are *moved*: a copy on the host takes their place. The copy stays valid until
// the next write, so that an unchanged source is copied once (`Events::about_to_write`). Gradients
// and other results of a backward pass get no recipe then: a copy is cheaper than the inputs that a
// recipe keeps. A source stays in memory (pinned) if code may read or write it unseen: its address
// was handed out, it is shared or page-locked memory, or it is small.
//
// Threads: the session mutex is free while an operator runs. Meanwhile the operator's operands are
// locked in the engine. A value that autograd has unpacked is not evicted until its node has run.
//
// Scenario: an evaluation loop under `no_grad` keeps all outputs in a list. The outputs are evicted
// when memory is short, and an output is recomputed when the program prints it.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "../../base/mutex.h"
#include "../recomputer/in_progress.h"
#include "../room/frees.h"
#include "../room/room.h"
#include "../sources/history.h"
#include "../sources/sources.h"
#include "pinned.h"
#include "readers.h"

namespace rekindle {

// Return true if `tensor`, a result of an operator, may be evicted while the program holds it: a
// floating-point value that Python code does not read directly.
bool is_returnable(const c10::TensorImpl& tensor);
// Return true if the value of `record` may be evicted and recomputed while the program holds it,
// unless it is being read.
bool may_return(const StorageRecord& record) noexcept;

// Storages that are locked in the engine, so that they are not evicted while they are read.
using Kept = c10::SmallVector<Ref<Storage>, 6>;

// What a call of `begin_reading` has locked, and all the memory that it reads.
struct Reads final {
    Kept kept;
    StorageList storages;
};

// Eviction of user-held values for one budget. Every member needs the session mutex.
class HeldEviction final {
public:
    HeldEviction(
        Frees& frees, Room& room, Sources& sources, const History& history, InProgress& in_progress
    )
        : frees_(frees),
          room_(room),
          sources_(sources),
          history_(history),
          in_progress_(in_progress) {}

    HeldEviction(const HeldEviction&) = delete;
    HeldEviction& operator=(const HeldEviction&) = delete;
    HeldEviction(HeldEviction&&) = delete;
    HeldEviction& operator=(HeldEviction&&) = delete;
    ~HeldEviction() = default;

    // Return true if `tensor`, a result of an operator, may be evicted while the program holds it.
    static bool is_returnable(const c10::TensorImpl& tensor);

    bool open = true;  // The budget has not ended.
    // Number of open scopes in which a value gets no recipe if it is made with grad mode off.
    int unrecorded = 0;

    // Return true if the results of operators with grad mode off get a recipe.
    bool records_without_grad() const;

    // Return true if sources may be moved to the host.
    bool moves() const noexcept { return frees_.events.swapper != nullptr; }

    // Restore all storages in `storages`, lock them in the engine, and add them to `kept`. After an
    // exception, `kept` lists the storages that are still locked.
    void bring(const StorageList& storages, Kept& kept, Locked& lock);
    // Unlock all storages in `kept`. The function is static, because the `HeldEviction` may have
    // been destroyed meanwhile.
    static void done(Frees& frees, Kept& kept);
    // Restore and lock all storages in `storages`, until `end_reading` is called with the number
    // that this function returns. writes: the reader may write as well.
    std::int64_t begin_reading(const StorageList& storages, bool writes, Locked& lock);
    void end_reading(std::int64_t number);
    // Make the value of `record`, which an operator of the program has just made or written, a
    // candidate for eviction.
    void made(StorageRecord& record);
    // Make the source `record` a candidate for eviction, if it may be moved to the host. `tensor`:
    // a tensor of the program with this memory.
    void offer(StorageRecord& record, const c10::TensorImpl& tensor);
    // Return the sources that the program holds and that stay in memory, with the reasons.
    std::vector<PinnedSource> pinned() const;
    // Keep the value of `record` in memory while the current autograd node runs, because kernels of
    // the node may read it without calling an operator.
    void pin_while_held(StorageRecord& record);

    // Exclude all user-held values from eviction. An operator is about to begin that may read any
    // of them.
    void stops() { pause(true); }

    // Prepare for an eviction. If threads run that the runtime does not know, exclude user-held
    // values from the eviction, because such a thread may read them unnoticed. Releases the session
    // mutex for a moment.
    void about_to_let_go(Locked& lock);
    // Release values without a recipe that the program has freed and only recipes need, if they
    // take too much memory. Called after an operator with grad mode off.
    void look_at_sources(Locked& lock);
    // Release sources (values without a recipe) that the program has freed, the largest first,
    // until `least` bytes are free. Before that, restore the values whose recipes need them. Return
    // true if memory was freed. Release none if all of them are smaller than `least`, and all if
    // `least` is not positive: the budget had room, but another limit was reached.
    bool release_dead_sources(Bytes least);

    // Run `step`. If it does not fit into the budget, call `release_dead_sources`, and run `step`
    // once more if that freed memory.
    template <class Step>
    void attempt(Step&& step) {
        std::optional<OutOfBudgetError> shortage = out_of_budget_of(step);
        if (!shortage) {
            return;
        }
        const Bytes missing = shortage->memory + shortage->needed - shortage->budget;
        if (!open || !release_dead_sources(missing)) {
            throw OutOfBudgetError(*std::move(shortage));
        }
        step();
    }

    // End the eviction of user-held values, before all evicted values are restored.
    void close();

private:
    // A value that an operator made or used in a backward pass, and the thread that runs this
    // backward pass.
    struct UsedInBackward final {
        std::thread::id thread;
        Ref<Storage> storage;
    };

    // A saved value that autograd unpacked for the backward node `node`, and the thread that
    // evaluates the node.
    struct Unpacked final {
        std::thread::id thread;
        const void* node;
        Ref<Storage> storage;
    };

    void make_source(StorageRecord& record);
    bool is_evictable_now(const StorageRecord& record) const noexcept;
    bool is_read_unlocked(const StorageRecord& record) const;
    void node_changes();
    void work_with(StorageRecord& record);
    static bool is_over(const UsedInBackward& worked);
    void pin_survivors();
    void pause(bool pause);
    bool exceeds_chain_limit(StorageRecord& record) const;

    static constexpr int OPERATORS_BETWEEN_LOOKS = 16;

    Frees& frees_;
    Room& room_;
    Sources& sources_;
    const History& history_;
    InProgress& in_progress_;
    // values that autograd unpacked for the backward nodes that run now
    std::vector<Unpacked> unpacked_;
    std::vector<UsedInBackward>
        backward_working_set_;  // values made or used in backward passes that still run
    // storages that `begin_reading` locked, by the number that it returned
    std::map<std::int64_t, Reads> reads_;
    std::int64_t numbers_ = 0;
    // number of operators until `look_at_sources` next adds up the bytes of the sources (values
    // without a recipe) that the program has freed
    int until_look_ = OPERATORS_BETWEEN_LOOKS;
    bool paused_ = false;  // user-held values are excluded from eviction for now
};

// Scope in which `storages` stay in memory. The constructor restores those that are evicted, and
// locks all of them in the engine; `end` unlocks them. After an exception the destructor does so.
// `end` needs the session mutex. The scope must end before the budget's state is destroyed.
class PinnedOperands final {
public:
    PinnedOperands(
        Frees& frees,
        HeldEviction& eviction,
        InProgress& in_progress,
        const StorageList& storages,
        Locked& lock
    );
    PinnedOperands(const PinnedOperands&) = delete;
    PinnedOperands& operator=(const PinnedOperands&) = delete;
    PinnedOperands(PinnedOperands&&) = delete;
    PinnedOperands& operator=(PinnedOperands&&) = delete;
    ~PinnedOperands();

    void end();

private:
    Frees& frees_;
    InProgress& in_progress_;
    const StorageList storages_;
    Kept kept_;
    bool ended_ = false;
};

}  // namespace rekindle
