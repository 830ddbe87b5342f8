#include "recomputer.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>

#include "../../base/clock.h"
#include "../../engine/frame.h"
#include "../../torch/raised.h"
#include "../slices/plan.h"
#include "recomputing.h"

namespace rekindle {

namespace {

// Raise an error if the custom operator of `facts` was removed or redefined after its first call.
// Its recipes could not run, or would run other code.
void check_that_it_is_still_there(const Facts& facts) {
    TORCH_CHECK(
        !was_removed(facts),
        "a result of the operator ",
        facts.name,
        " has to be recomputed, but the operator was removed or redefined since. Run the "
        "backward pass before that, or write rekindle.never_recompute() around the operator"
    );
}

}  // namespace

Bytes Recomputer::workspace(const Call& call) const noexcept {
    return static_cast<const Recipe&>(call).aside->workspace;
}

// Engine action: evict `storage`, or free it if neither the program nor a recipe can use its value
// again.
void Recomputer::free(Storage& storage) {
    StorageRecord& record = record_of(storage);
    registry_.observers.evictions += storage.dead() ? 0 : 1;
    StoragePtr memory = registry_.evict(record);
    if (events_.swapper != nullptr) [[unlikely]] {
        events_.swapper->gone(record, std::move(memory));
    }
}

// Engine action: start to copy `storage` to the host. Evict the value from device memory unless
// `keep`.
bool Recomputer::swap_out(Storage& storage, bool keep) {
    StorageRecord& record = record_of(storage);
    if (!events_.swapper->begin(record)) {
        return false;
    }
    if (!keep) {
        registry_.observers.evictions += record.dead() ? 0 : 1;
        StoragePtr memory = registry_.evict(record);
        events_.swapper->gone(record, std::move(memory));
    }
    return true;
}

// Engine action: read the value of `storage` from its host copy. If `early`, do not wait for the
// end of the transfer.
void Recomputer::swap_in(Storage& storage, bool early) {
    StorageRecord& record = record_of(storage);
    refuse_in_a_graph(record.site());
    if (const StoragePtr storage_impl = events_.swapper->fetch(record, early); storage_impl) {
        registry_.attach(record, storage_impl);
    } else if (!record.resident && record.on_host) {
        if (!record.replayable) {
            throw SwapReadError(record.site());
        }
        engine_.swap_in_failed(record);
    }  // null: the swap-out was cancelled, or the engine recomputes the value
}

// Question of the engine: does the host copy of `storage` have old contents?
bool Recomputer::is_copy_outdated(Storage& storage) {
    return events_.swapper->is_copy_outdated(record_of(storage));
}

// Engine action: free the host copy of `storage`.
void Recomputer::discard(Storage& storage) {
    events_.swapper->discard(record_of(storage));
}

// Finish the swap-outs of storages that `call` overwrites. Then wait until the room that the engine
// made is really free on the device.
void Recomputer::wait_for_room(Call& call, bool in_place) {
    if (in_place) {
        for (const Overwrite& pair : call.overwrites()) {
            events_.swapper->finish_swap_out(record_of(*pair.source->storage));
        }
    }
    events_.swapper->wait_for(call.nbytes + engine_.workspace_of(call));
}

// Engine action: recompute the outputs of the operator call `call`.
void Recomputer::compute(Call& call, bool in_place) {
    if (events_.swapper == nullptr) {
        compute_now(call, in_place);
        return;
    }
    if (!call.replayable && call.ran) [[unlikely]] {  // its copy on the host could not be read
        throw SwapReadError(recipe_of(call).name());
    }
    for (const Edge& edge : call.inputs()) {
        events_.swapper->finish(record_of(*edge.value->storage));
    }
    for (const Overwrite& pair : call.overwrites()) {
        events_.swapper->finish(record_of(*pair.source->storage));
    }
    wait_for_room(call, in_place);
    compute_now(call, in_place);
    for (const Value* value : call.outputs()) {
        if (is_root(*value)) {
            events_.swapper->returned(record_of(*value->storage));
        }
    }
}

// Let the current stream wait for the streams that computed the inputs of `recipe`. Return the
// current stream, on which the recomputation runs.
StreamIndex Recomputer::order_recomputation(const Recipe& recipe, bool in_place) {
    const StreamIndex here = registry_.device.see();
    for (const auto& input : recipe.inputs()) {
        const StorageRecord& record = record_of(*input.value->storage);
        if (const StoragePtr storage_impl = record.at()) {
            registry_.device.about_to_read_again(*storage_impl, record.id, here);
        }
    }
    if (in_place) {
        for (const Overwrite& pair : recipe.overwrites()) {
            registry_.device.about_to_write_again(pair.source->storage->id, here);
        }
    }
    return here;
}

// Run `attempt`. After a device OOM, evict values and run `attempt` again, if the call can be
// repeated.
template <class F>
void Recomputer::or_rescue(const Recipe& recipe, bool in_place, F&& attempt) {
    try {
        attempt();
    } catch (const std::exception& error) {
        if ((in_place && !recipe.facts->retryable_after_oom) || !is_device_oom(error)) {
            throw;
        }
        const std::uint64_t visits = engine_.visits();
        room_.rescue(recipe.nbytes, error, [&] {
            // While the kernel ran, another thread may have read the input that the kernel writes
            // in place. That thread may have seen partly written data, so the call cannot be
            // repeated.
            if (in_place && visits != engine_.visits()) {
                throw DeviceOutOfMemoryError(message_of(error));
            }
            attempt();
        });
    }
}

// Return the bytes that a call in slices may use beside its results: all that is free. Then its
// slices are as large as possible.
Bytes Recomputer::room_for_slices(const Recipe& recipe) {
    if (!recipe.sliced()) [[likely]] {
        return 0;
    }
    const Bytes least = recipe.aside->workspace;
    const Bytes free = engine_.budget - engine_.memory - engine_.in_flight - recipe.nbytes;
    const Bytes most = free - free / 16;  // kernels may need some memory of their own
    const Bytes used = std::min(std::max(least, most), useful_workspace(*recipe.sliced()));
    engine_.raise_peak(recipe.nbytes + used);
    return used;
}

// Run the operator call of `recipe` again, and put the memory of its outputs into `storages`.
// Return the stream on which the call ran, and the time at which it was queued there. Readers on
// other streams wait for that.
Order Recomputer::run(Recipe& recipe, bool in_place, c10::SmallVector<StoragePtr, 2>& storages) {
    const bool interrupted = events_.tests.interrupts();
    room_.refuse_for_tests(recipe.name());
    check_that_it_is_still_there(*recipe.facts);
    const auto call = [&](std::span<const StoragePtr> operands, Kernel kernel) {
        Recomputing recomputing(frees_, in_progress_, recipe, in_place, operands);
        try {
            kernel();
        } catch (const std::exception& error) {
            if (registry_.device.queues() && recipe.facts->retryable_after_oom &&
                is_device_oom(error)) {
                recomputing.undo();
            }
            throw;
        }
    };
    const Bytes room = room_for_slices(recipe);
    Order order;
    const auto run_in_order = [&] {
        const StreamIndex here = order_recomputation(recipe, in_place);
        storages = run_again(recipe, in_place, room, call);
        order = registry_.device.streams.made_by(here, true);
    };
    if (registry_.device.queues()) {
        find_places(recipe, in_place);
        or_rescue(recipe, in_place, run_in_order);
    } else if (recipe.sliced()) [[unlikely]] {
        const Nanoseconds started = now_ns();
        auto mistrust = c10::make_scope_exit([&] { forget_rows(*recipe.sliced()); });
        storages = run_again(recipe, in_place, room, call);
        if (!is_outdated(recipe)) {
            mistrust.release();
            // the budget does not count them
            forget_rows(*recipe.sliced(), engine_.budget / SMALL_SHARE);
        }
        const Nanoseconds time = now_ns() - started;
        const Nanoseconds once = time_once(*recipe.sliced());
        SlicedRuns& runs = registry_.observers.sliced_runs;
        runs.add(*recipe.facts, recipe.aside->slices, time);
        if (!recipe.ran) {
            runs.count(time, once, recipe.cost);
        }
    } else {
        storages = run_again(recipe, in_place, room, call);
    }
    TORCH_CHECK(!interrupted, "interrupted after a replay");
    return order;
}

// Before a recomputation of `recipe`, free blocks on the device that are large enough for its
// outputs and its workspace.
void Recomputer::find_places(const Recipe& recipe, bool in_place) {
    if (!room_.reserved.limited()) {
        return;
    }
    for (const Value* value : recipe.outputs()) {
        if (!in_place) {
            room_.reserved.find_place(value->storage->nbytes);
        }
    }
    room_.reserved.find_place(recipe.aside ? recipe.aside->workspace : 0);
}

// Run the operator call `call` again, and bind the records of its outputs to the new memory.
void Recomputer::compute_now(Call& call, bool in_place) {
    Recipe& recipe = recipe_of(call);
    refuse_in_a_graph(recipe.name());
    c10::SmallVector<StoragePtr, 2> storages;
    Order order;
    try {
        const ScopedCount counted(in_progress_.recomputations);
        order = run(recipe, in_place, storages);
    } catch (std::exception& error) {
        // The failed kernel may have written a part of the input that it overwrites. The old
        // contents of this input cannot be restored, so the input is lost.
        if (in_place) {
            after(error, [&] {
                for (const Overwrite& pair : call.overwrites()) {
                    engine_.spoil(*pair.source->storage);
                }
            });
        }
        throw;
    }
    if (call.ran) {
        ++registry_.observers.recomputations;
        events_.tests.recomputed(recipe.facts);
    }
    if (is_outdated(call)) {
        return;
    }
    settle_results(recipe, storages, order);
    if (registry_.observers.audit) [[unlikely]] {
        registry_.observers.audit->made_again(recipe, registry_.device);
    }
}

// Raise an error if a CUDA graph is being captured. A recomputation during the capture would become
// part of the graph, and the value would exist only after a replay of the graph. `site` names the
// operator that made the value, for the text of the error.
void Recomputer::refuse_in_a_graph(const char* site) const {
    if (registry_.device.is_capturing()) {
        throw RecomputeDuringCaptureError(site);
    }
}

// Bind the records of the outputs of `recipe` to `storages`: the memory that a recomputation has
// just allocated for these outputs.
void Recomputer::settle_results(
    Recipe& recipe, const c10::SmallVector<StoragePtr, 2>& storages, const Order& order
) {
    // True if the program holds the storage of an output, so that it may read the recomputed value
    // without calling an operator.
    bool is_programs = false;
    std::size_t next = 0;
    for (const Value* value : recipe.outputs()) {
        StorageRecord& made = record_of(*value->storage);
        const StoragePtr& storage_impl = storages[next++];
        if (!made.resident) {
            is_programs = is_programs || made.placeholder;
            registry_.device.streams.note(made.id, order);
            registry_.place(made, storage_impl, registry_.detach_placeholder(made));
        }
    }
    if (is_programs && registry_.device.streams.are_several() && registry_.device.orders_readers) {
        registry_.device.streams.let_others_wait(order.maker);
    }
}

void Recomputer::dispose(Storage& storage) noexcept {
    registry_.dispose(record_of(storage));
}

void Recomputer::dispose(Call& call) noexcept {
    registry_.records.drop(recipe_of(call));
}

}  // namespace rekindle
