// Runs events of the engine: swaps, errors and dropped recipes included.
//
// An event after which the engine may act runs within `Events::perform`.
#pragma once

#include <c10/util/FunctionRef.h>

#include <memory>
#include <vector>

#include "../../base/mutex.h"
#include "../../engine/engine.h"
#include "../../ops/errors.h"
#include "../registry/registry.h"
#include "only_counting.h"
#include "swapper.h"
#include "test_hooks.h"
#include "thread_flag.h"

namespace rekindle {

// Return the error for `shortage`. The error names the operator `who`, or the operator that was to
// be recomputed.
OutOfBudgetError out_of_budget(const NoRoom& shortage, const char* who);

// Runs events of one budget's engine, and swaps values to the host meanwhile. The caller holds the
// session mutex.
class Events final {
public:
    Events(Engine& engine, Registry& registry) : engine_(engine), registry_(registry) {}

    Events(const Events&) = delete;
    Events& operator=(const Events&) = delete;
    ~Events() = default;

    // swaps values to host memory or to a file; null: swapping is off
    std::unique_ptr<Swapper> swapper;
    OnlyCounting only_counting;
    // The thread runs an optimizer step that nothing can undo: exceed the budget rather than let it
    // fail.
    ThreadFlag must_finish;
    TestHooks tests;

    // Run `events`, which call the engine. Then take references to the values whose recipe was
    // dropped meanwhile, because these values must stay in memory.
    template <class F>
    void perform(F&& events, const char* who = "") {
        assert_locked();
        try {
            act(events);
        } catch (const NoRoom& shortage) {
            throw out_of_budget(shortage, who);
        }
        if (engine_.has_unrecomputable()) [[unlikely]] {
            own_unrecomputable();
        }
    }

    // Report the bytes in use to the observers. Called after every operator that changes them.
    void note_memory();

    // -- swapping -------------------------------------------------------------------------------

    // Start swapping values to the host. `copies` is the Python object that stores them.
    void swap_with(const Swap& swap, struct _object* copies);

    // Return true if there are copies on the host to free.
    bool has_discarded() const noexcept {
        return engine_.host != nullptr && !engine_.host->discarded.empty();
    }

    // Wait until no transfer between device and host is in flight. After that the memory of evicted
    // values is really free.
    void wait_for_copies() const;
    // Finish the copy of `record` to the host, because its memory is about to be written.
    void finish_swap_out(StorageRecord& record) const;

    // Finish the copy of `record` to the host, because its memory is about to be written. If the
    // value is a source (it has no recipe), discard the copy, which has the old contents.
    void about_to_write(StorageRecord& record);
    // Discard the copies on the host of all sources in memory, because code that Rekindle does not
    // see may write any of them.
    void about_to_write_anything();

    // Wait for the swap-in of `record`, because the program is about to read its value. Do nothing
    // during CUDA graph capture, where waiting is impossible.
    void finish_swap_in(StorageRecord& record) const {
        if (swapper != nullptr && !registry_.device.is_capturing()) [[unlikely]] {
            swapper->finish(record);
        }
    }

private:
    // Run `events` while the engine regards every transfer between device and host as finished.
    template <class F>
    void act(F&& events) const {
        if (swapper == nullptr) [[likely]] {
            events();
        } else {
            act_swapping(events);
        }
    }

    void act_swapping(c10::function_ref<void()> events) const;
    void own_unrecomputable();
    bool needs_no_records() const;

    Engine& engine_;
    Registry& registry_;
    // Buffer of `perform`: values whose recipe was dropped during the event, so that they must stay
    // in memory.
    std::vector<Storage*> unrecomputable_;
};

}  // namespace rekindle
