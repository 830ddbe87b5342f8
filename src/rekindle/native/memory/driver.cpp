// The central part of the driver: the active driver of the process, evictions for new allocations,
// processing of freed storages, and the engine's actions. driver.h lists the other files.
#include "driver.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "../allocator/arena.h"
#include "../torch/backward.h"
#include "../torch/dispatch_key.h"
#include "../torch/poison.h"
#include "../torch/private_generators.h"
#include "../torch/raised.h"
#include "../torch/storage_ptr.h"
#include "evict_held_last.h"
#include "held_eviction.h"
#include "own_policy.h"
#include "program.h"
#include "recomputing.h"
#include "swapper.h"

namespace rekindle {

namespace {

std::vector<Driver*>& drivers() {
    static auto& made = leaky_singleton<std::vector<Driver*>>();
    return made;
}

// Length of `drivers()`, which any thread may read without the session mutex.
std::atomic<int> n_drivers{0};

struct Active final {
    SpinLock& flag = leaf(Leaf::active);
    c10::intrusive_ptr<Driver> driver;
    pthread_t entered_in{};  // thread that opened the budget
    // A thread that the program started inside the budget has run a backward pass, so it may free
    // gradients that the main thread reads.
    bool trained_elsewhere = false;
};

[[gnu::always_inline]] inline Active& the_active() {
    static auto& made = leaky_singleton<Active>();
    return made;
}

// Return the sequence number of the budget (driver) to which this thread was assigned (`join`). The
// number is 0 for a thread that was assigned to none, such as a thread of autograd's engine. Such a
// thread works within the active budget.
std::uint64_t& joined() noexcept {
    thread_local std::uint64_t which = 0;
    return which;
}

std::uint64_t next_ordinal() noexcept {
    static std::atomic<std::uint64_t> made = 0;
    return made.fetch_add(1, std::memory_order_relaxed) + 1;
}

// Return true if the program started this thread, which was assigned to the budget `which`, inside
// the active budget. The caller holds the session mutex.
bool is_started_inside(std::uint64_t which) noexcept {
    if (which == 0) [[likely]] {
        return false;
    }
    return this_thread() != the_active().entered_in;
}

// Return the driver of the active budget if this thread, which was assigned to the budget `which`,
// works within the active one, else null. The caller holds the session mutex or the spin lock of
// `Active`.
[[gnu::always_inline]] inline c10::intrusive_ptr<Driver> active_for(std::uint64_t which) {
    const c10::intrusive_ptr<Driver>& driver = the_active().driver;
    if (which != 0 && driver && which != driver->ordinal) [[unlikely]] {
        return {};
    }
    return driver;
}

}  // namespace

c10::intrusive_ptr<Driver> active() {
    const std::scoped_lock guard(the_active().flag);
    return active_for(joined());
}

c10::intrusive_ptr<Driver> lock_and_see(c10::DispatchKeySet keys) {
    // Operators on meta tensors use no memory. If this thread already holds the session mutex,
    // Python code runs inside the core, for example the callback of a weak reference to a storage.
    // Operators of such code are not the program's, nor are those that a recomputed operator calls.
    // All these bypass the budget.
    if (keys.has_backend(c10::BackendComponent::MetaBit) || the_mutex().mine() ||
        PrivateGenerators::current() != nullptr) [[unlikely]] {
        return {};
    }
    std::unique_lock lock(the_mutex());
    const std::uint64_t which = joined();
    c10::intrusive_ptr<Driver> driver = active_for(which);
    if (!driver) [[unlikely]] {
        if (which != 0) {
            join(nullptr);  // another thread has ended the budget of this thread
        }
        return {};
    }
    if (is_started_inside(which) && in_backward_pass()) [[unlikely]] {
        the_active().trained_elsewhere = true;
    }
    lock.release();
    return driver;
}

bool gradients_stay() {
    const auto lock = locked_if_not_mine();
    return !the_active().trained_elsewhere && !is_started_inside(joined());
}

bool looks_later() {
    const auto lock = locked_if_not_mine();
    return !the_active().trained_elsewhere && is_started_inside(joined());
}

bool any_drivers() noexcept {
    return n_drivers.load(std::memory_order_relaxed) != 0;
}

void tensor_moved(const c10::TensorImpl& tensor, c10::StorageImpl& before) {
    const auto lock = locked_if_not_mine();
    for (Driver* each : drivers()) {
        each->note_moved(tensor, before);
    }
}

void join(const Driver* driver) noexcept {
    joined() = driver == nullptr ? 0 : driver->ordinal;
    c10::impl::tls_set_dispatch_key_included(KEY, driver != nullptr);
}

bool rejoin() {
    if (c10::impl::tls_is_dispatch_key_included(KEY)) [[likely]] {
        return true;
    }
    const c10::intrusive_ptr<Driver> driver = joined() == 0 ? nullptr : active();
    if (!driver || is_in_fake_mode()) {
        return false;
    }
    c10::impl::tls_set_dispatch_key_included(KEY, true);
    ++driver->rejoined;
    return true;
}

void set_active(c10::intrusive_ptr<Driver> driver) {
    // Other threads read the active driver with the session mutex or the spin lock held.
    const auto lock = locked_if_not_mine();
    const std::scoped_lock guard(the_active().flag);
    std::swap(the_active().driver, driver);
    if (the_active().driver) {
        the_active().entered_in = this_thread();
        the_active().trained_elsewhere = false;
    }
}

Driver::Driver(
    Bytes budget,
    c10::Device where,
    bool assumed,
    bool learns,
    const Policy& policy,
    std::unique_ptr<PythonChooser> own
)
    : device(where),
      registry(device, observers, assumed),
      own_policy(own.get()),
      engine(budget, *this, policy, learns, {}, std::move(own)),
      events(engine, registry),
      frees(engine, registry, events),
      room(frees, own_policy),
      ordinal(next_ordinal()) {
    observers.number = reinterpret_cast<std::ptrdiff_t>(this);
    observers.transcriber.follow(engine);
    if (own_policy != nullptr) {
        own_policy->choose_for(frees);
        events.only_counting.allowed = false;
    }
    drivers().push_back(this);
    ++n_drivers;
}

// NOLINTNEXTLINE(bugprone-exception-escape): throws only if not one byte is left for bookkeeping
Driver::~Driver() {
    without_throwing([&] { events.swapper.reset(); });
    const auto lock = locked_if_not_mine();
    std::erase(drivers(), this);
    --n_drivers;
    notify_gone();
    observers.steps = nullptr;
    steps.reset();
    held_eviction.reset();
    registry.close();
    frees.outside.close();
    resizing_ = {};
    emptied_.clear();
    tracking_suspended_.clear();
}

std::size_t drivers_alive() noexcept {
    const auto lock = locked_if_not_mine();
    return drivers().size();
}

// -- memory ---------------------------------------------------------------------------------------

void Driver::close() {
    // The books are closed also if a value cannot be restored: its operator fails, or Ctrl-C.
    const auto closed = c10::make_scope_exit([&] { close_books(); });
    bring_all_back();
}

void Driver::close_books() noexcept {
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        if (Gathered* source = record_of(*each).special.gathered()) {
            source->unwatched = true;
        }
        if (each->references == 0 && !each->consumed()) {
            // Drop the weak reference to the tensor, because `torch.utils.swap_tensors` refuses a
            // tensor that has one.
            record_of(*each).origin = no_tensor();
        }
    }
    registry.free_queue.late.store(true, std::memory_order_relaxed);
    if (std::exchange(uses_arena, false)) {
        the_arena().close();
    }
}

void process_pending_late() noexcept {
    if (!the_mutex().try_lock()) {
        return;
    }
    without_throwing([] {
        for (Driver* each : drivers()) {
            if (each->registry.free_queue.late.load(std::memory_order_relaxed) &&
                each->registry.free_queue.any()) {
                each->frees.process_pending();
            }
        }
    });
    the_mutex().unlock();
}

const char* Driver::fault() {
    return registry.fault(engine.first_storage());
}

std::size_t Driver::bytes_of_bookkeeping() const noexcept {
    return registry.records.nbytes() + observers.module_tensors.nbytes() + engine.graph.nbytes() +
           bytes_of_positions() + static_cast<std::size_t>(device.streams.nbytes());
}

// -- actions --------------------------------------------------------------------------------------

Bytes Driver::workspace(const Call& call) const noexcept {
    return static_cast<const Recipe&>(call).aside->workspace;
}

// Engine action: evict `storage`, or free it if neither the program nor a recipe can use its value
// again.
void Driver::free(Storage& storage) {
    observers.evictions += storage.dead() ? 0 : 1;
    if (!registry.evict_keeping_placeholder(record_of(storage))) {
        registry.held_list.remove(record_of(storage));
        registry.vacate(record_of(storage));
        if (events.swapper != nullptr) [[unlikely]] {
            events.swapper->gone(record_of(storage));
        }
    }
}

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

// Run `attempt`. After a device OOM, evict values and run `attempt` again, if the call can be
// repeated.
template <class F>
void or_rescue(Driver& driver, const Recipe& recipe, bool in_place, F&& attempt) {
    try {
        attempt();
    } catch (const std::exception& error) {
        if ((in_place && !recipe.facts->retryable_after_oom) || !is_device_oom(error)) {
            throw;
        }
        const std::uint64_t visits = driver.engine.visits();
        driver.room.rescue(recipe.nbytes, error, [&] {
            // While the kernel ran, another thread may have read the input that the kernel writes
            // in place. That thread may have seen partly written data, so the call cannot be
            // repeated.
            if (in_place && visits != driver.engine.visits()) {
                throw DeviceOutOfMemoryError(message_of(error));
            }
            attempt();
        });
    }
}

}  // namespace

// Let the current stream wait for the streams that computed the inputs of `recipe`. Return the
// current stream, on which the recomputation runs.
StreamIndex Driver::order_recomputation(const Recipe& recipe, bool in_place) {
    const StreamIndex here = device.see();
    for (const auto& input : recipe.inputs()) {
        const StorageRecord& record = record_of(*input.value->storage);
        if (const StoragePtr storage_impl = record.at()) {
            device.about_to_read_again(*storage_impl, record.id, here);
        }
    }
    if (in_place) {
        for (const Overwrite& pair : recipe.overwrites()) {
            device.about_to_write_again(pair.source->storage->id, here);
        }
    }
    return here;
}

// Run the operator call of `recipe` again, and put the memory of its outputs into `storages`.
// Return the stream on which the call ran, and the time at which it was queued there. Readers on
// other streams wait for that.
Order Driver::run(Recipe& recipe, bool in_place, c10::SmallVector<StoragePtr, 2>& storages) {
    const bool interrupted = events.tests.interrupts();
    room.refuse_for_tests(recipe.name());
    check_that_it_is_still_there(*recipe.facts);
    const auto call = [&](std::span<const StoragePtr> operands, Kernel kernel) {
        Recomputing recomputing(*this, recipe, in_place, operands);
        try {
            kernel();
        } catch (const std::exception& error) {
            if (device.queues() && recipe.facts->retryable_after_oom && is_device_oom(error)) {
                recomputing.undo();
            }
            throw;
        }
    };
    Order order;
    const auto run_in_order = [&] {
        const StreamIndex here = order_recomputation(recipe, in_place);
        storages = run_again(recipe, in_place, call);
        order = device.streams.made_by(here, true);
    };
    if (device.queues()) {
        find_places(recipe, in_place);
        or_rescue(*this, recipe, in_place, run_in_order);
    } else {
        storages = run_again(recipe, in_place, call);
    }
    TORCH_CHECK(!interrupted, "interrupted after a replay");
    return order;
}

// Before a recomputation of `recipe`, free blocks on the device that are large enough for its
// outputs and its workspace.
void Driver::find_places(const Recipe& recipe, bool in_place) {
    if (!room.reserved.limited()) {
        return;
    }
    for (const Value* value : recipe.outputs()) {
        if (!in_place) {
            room.reserved.find_place(value->storage->nbytes);
        }
    }
    room.reserved.find_place(recipe.aside ? recipe.aside->workspace : 0);
}

// Run the operator call `call` again, and bind the records of its outputs to the new memory.
void Driver::compute_now(Call& call, bool in_place) {
    Recipe& recipe = recipe_of(call);
    refuse_in_a_graph(recipe.name());
    c10::SmallVector<StoragePtr, 2> storages;
    Order order;
    try {
        const Counted counted(in_progress.recomputations);
        order = run(recipe, in_place, storages);
    } catch (std::exception& error) {
        // The failed kernel may have written a part of the input that it overwrites. The old
        // contents of this input cannot be restored, so the input is lost.
        if (in_place) {
            after(error, [&] {
                for (const Overwrite& pair : call.overwrites()) {
                    engine.spoil(*pair.source->storage);
                }
            });
        }
        throw;
    }
    ++observers.recomputations;
    events.tests.recomputed(recipe.facts);
    // If another thread removed the recipe while the recomputation ran, nothing needs the outputs.
    if (!call.replayable || !call.linked) {
        return;
    }
    settle_results(recipe, storages, order);
    if (observers.audit) [[unlikely]] {
        observers.audit->made_again(recipe, device);
    }
}

// Raise an error if a CUDA graph is being captured. A recomputation during the capture would become
// part of the graph, and the value would exist only after a replay of the graph. `site` names the
// operator that made the value, for the text of the error.
void Driver::refuse_in_a_graph(const char* site) const {
    if (device.is_capturing()) {
        throw RecomputeDuringCaptureError(site);
    }
}

// Bind the records of the outputs of `recipe` to `storages`: the memory that a recomputation has
// just allocated for these outputs.
void Driver::settle_results(
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
            device.streams.note(made.id, order);
            registry.place(made, storage_impl, registry.detach_placeholder(made));
        }
    }
    if (is_programs && device.streams.are_several() && device.orders_readers) {
        device.streams.let_others_wait(order.maker);
    }
}

void Driver::dispose(Storage& storage) noexcept {
    registry.dispose(record_of(storage));
}

void Driver::dispose(Call& call) noexcept {
    registry.records.drop(recipe_of(call));
}

}  // namespace rekindle
