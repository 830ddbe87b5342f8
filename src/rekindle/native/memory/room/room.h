// Makes room in memory: evicts values before memory is needed, and restores evicted ones.
#pragma once

#include <algorithm>
#include <exception>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../../engine/engine.h"
#include "../../engine/frame.h"
#include "../../ops/errors.h"
#include "../../torch/device.h"
#include "../registry/registry.h"
#include "budget_backoff.h"
#include "events.h"
#include "frees.h"
#include "reserved.h"
#include "thread_flag.h"

namespace rekindle {

// Return true if the recipe of `record` may be dropped: every other output of the same calls is in
// memory, or nothing can use it again.
bool may_forget(StorageRecord& record);

// Return the sources (values without a recipe) that the program has freed and that recipes of other
// values still need.
std::vector<Ref<Storage>> dead_sources(const Engine& engine);
Bytes bytes_of(std::span<const Ref<Storage>> storages);

// Raise an error if `record`, which the program reads, cannot be computed any more.
void refuse_lost(const StorageRecord& record);

// Room within one budget. The caller holds the session mutex.
class Room final {
public:
    // `own_policy`: a policy written in Python, or null.
    Room(Frees& frees, PythonChooser* own_policy)
        : reserved(frees, own_policy),
          engine_(frees.engine),
          registry_(frees.registry),
          observers_(frees.registry.observers),
          device_(frees.registry.device),
          events_(frees.events),
          frees_(frees) {}

    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;
    ~Room() = default;

    BudgetBackoff backoff;
    Reserved reserved;
    ThreadFlag stepping;  // the thread runs an optimizer step

    // Return true if each operator makes room for its own workspace. During an optimizer step that
    // cannot be undone, operators do not: room for the whole step is made when the step begins,
    // unless weights and state may move to the host.
    bool reserves_for_operators() const noexcept {
        return !stepping.is_set() || observers_.due.tell_ranges || events_.must_finish.is_set();
    }

    // For tests: raise `OutOfBudget` if this is the operator that a test has chosen to fail. `who`:
    // name of the operator.
    void refuse_for_tests(const char* who) {
        if (reserves_for_operators() && !events_.must_finish.is_set() && events_.tests.refuses()) {
            throw OutOfBudgetError{1, engine_.memory, engine_.budget, who};
        }
    }

    // -- eviction -------------------------------------------------------------------------------

    // Return the bytes to leave free on a device for an allocation of `needed` bytes. The result is
    // 0 for small allocations: an error in one could interrupt code that cannot recover, such as
    // `capture_begin` while it sets a generator's state.
    Bytes kept_back(Bytes needed) const noexcept {
        constexpr Bytes small = Bytes{4} << 10;
        constexpr Bytes most = Bytes{64} << 10;
        if (!device_.queues() || !device_.keeps_back || needed <= small) [[likely]] {
            return 0;
        }
        return std::min(most, engine_.budget >> 10);
    }

    // Evict values until `needed` bytes fit. Throw `OutOfBudgetError`, which names the operator
    // `who`, if that is impossible.
    void make_room(Bytes needed, const char* who);
    // Evict values until `wanted` more bytes fit, or until no candidate for eviction is left.
    void clear(Bytes wanted);
    // Evict every value that may be evicted.
    void evict_all();
    // Release sources (values without a recipe) that are kept only for recomputations of values
    // that are in memory, unless this frees fewer than `least` bytes. Return true if memory was
    // freed.
    bool release_recompute_sources(Bytes least = 0);
    // Called after each operator. In a forward pass, start to copy values to the host that will
    // probably be evicted next. In a backward pass, start to swap in the values that it reads next,
    // once no swap-out is queued. Once a step has ended, start to swap in the source that the
    // program uses next.
    void swap_ahead();
    // Return true if `swap_ahead` may evict values that the program holds, to make room for a
    // source that it uses next.
    bool anticipates() const noexcept;
    // Recover from the device OOM `out`, which happened although the budget had room. Evict more
    // and more, and run `attempt` again after each stage: neighbors in memory, `needed` bytes, four
    // times as much, everything. The next operator would fail like this one, so the budget is
    // lowered to the bytes that did fit.
    template <class F>
    void rescue(Bytes needed, const std::exception& out, F&& attempt);

    // Return the bytes that restoring the evicted `record` takes at most at once, if nothing but
    // the inputs of its recipe must be in memory.
    Bytes bytes_to_restore(const StorageRecord& record) const;
    // Return true if `record` is a value without room (NOTE [Values without room]), and evictions
    // cannot make room for it now.
    bool is_without_room(const StorageRecord& record) const;

    // -- values ---------------------------------------------------------------------------------

    // Run `events` like `Frees::recompute`. If they do not fit, find more room and run them once
    // more.
    template <class F>
    void bring(F&& events);
    // Put the value of `record` into memory for the program, recomputing the value if it was
    // evicted.
    void use(StorageRecord& record);
    // Put the value of `record` into memory, recomputing the value if it was evicted, and never
    // evict it again.
    void pin(StorageRecord& record);
    // Remove the recipe of `record`, whose value is in memory. From then on the value is never
    // evicted, because it cannot be recomputed.
    void seal(StorageRecord& record);
    // If the value of `storage_impl` was evicted, so that the storage is an empty placeholder,
    // restore the contents.
    void bring_back(const c10::StorageImpl& storage_impl);

private:
    bool finds_more(Bytes needed);
    void evict_for(Bytes needed, const char* who);
    void make_room_and_wait(Bytes needed, const char* who);

    Engine& engine_;
    Registry& registry_;
    Observers& observers_;
    Device& device_;
    Events& events_;
    Frees& frees_;
};

template <class F>
void Room::rescue(Bytes needed, const std::exception& out, F&& attempt) {
    const Bytes at_first = engine_.memory;
    const bool known = reserved.limited();
    reserved.turned_out(device_.most_reserved());
    std::string said = message_of(out);
    bool lowers = known || !device_.finds_places;
    const auto fits = [&] {
        events_.wait_for_copies();
        const Bytes now = engine_.memory + engine_.in_flight + needed;
        try {
            attempt();
            backoff.fitted(
                lowers ? std::max(now, at_first / 2 + needed) : UNLIMITED, engine_.budget
            );
            return true;
        } catch (const std::exception& error) {
            if (!is_device_oom(error)) {
                throw;
            }
            said = message_of(error);
            return false;
        }
    };
    const Bytes asked = asked_for(said);
    const Bytes piece = asked == 0 || (needed > 0 && needed < asked) ? needed : asked;
    if (reserved.evict_neighbors(piece) && fits()) {
        return;
    }
    lowers = true;
    const Bytes before = engine_.memory;
    const Bytes step = backoff.step(needed, before);
    for (const Bytes most : {before - step, before - 4 * step, Bytes{-1}}) {
        frees_.outside.ask_allocator();
        frees_.poll_held();
        events_.perform([&] { engine_.shrink(most); });
        device_.empty_cache();
        if (fits()) {
            return;
        }
    }
    throw DeviceOutOfMemoryError(said);
}

template <class F>
void Room::bring(F&& events) {
    try {
        frees_.recompute(events);
    } catch (const OutOfBudgetError& shortage) {
        if (!finds_more(shortage.needed)) {
            throw;
        }
        const BudgetBackoff::ScopedNoBackoff insisting(backoff);
        frees_.recompute(events);
    }
}

}  // namespace rekindle
