// The state of one budget: performs the engine's actions on PyTorch's storages, and reports to the
// engine what the program did with them.
//
// A driver handles storages only. Operators and autograd use it through dispatch/. There is one
// driver per `rekindle.budget(...)`. A driver lives until its budget has ended and autograd's
// handles of its values (`SavedTensorHandle`) are destroyed.
//
// Terms: a record describes one storage. A source is a storage without a recipe, which cannot be
// recomputed. A value is user-held if variables of the program refer to it. A placeholder is the
// empty storage that an evicted user-held value leaves to the program. A handle is a reference of
// autograd to a saved value.
//
// Locking: the caller of a member holds the session mutex, unless the member's comment says
// otherwise (see NOTE [Lock discipline] in base/mutex.h).
//
// Members are defined in several files: driver.cpp (memory and actions), storages.cpp (registration
// and lifetime of storages), evict_held_last.cpp (user-held values), external_memory.cpp,
// history.cpp, snapshot.cpp, neighbors.cpp, swapping.cpp and transcript.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../engine/engine.h"
#include "../engine/frame.h"
#include "../engine/performer.h"
#include "../ops/errors.h"
#include "../ops/prices.h"
#include "../torch/device.h"
#include "../torch/rng_history.h"
#include "../torch/storage_ptr.h"
#include "events.h"
#include "foreign_memory.h"
#include "frees.h"
#include "in_progress.h"
#include "observers.h"
#include "readers.h"
#include "recipe.h"
#include "registry.h"
#include "room.h"
#include "snapshot.h"
#include "step_observer.h"
#include "storage_record.h"

namespace rekindle {

class HeldEviction;
class EvictHeldLast;
class PythonChooser;  // NOLINT(cppcoreguidelines-virtual-class-destructor): it is final
class Reading;
class Swapper;

// The state of one budget. Performs the engine's actions, such as evicting a storage.
class Driver final : public c10::intrusive_ptr_target, public Performer {
public:
    // `where` is the device whose memory the budget limits. If `assumed`, the user did not name it,
    // and a program that uses another device gets an error. If `learns`, the engine follows learned
    // plans. `own` is a policy written in Python that replaces `policy`, or null.
    Driver(
        Bytes budget,
        c10::Device where,
        bool assumed,
        bool learns,
        const Policy& policy,
        std::unique_ptr<PythonChooser> own
    );
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;
    Driver(Driver&&) = delete;
    Driver& operator=(Driver&&) = delete;
    ~Driver() override;

private:
    ForeignMemory foreign_;
    Ref<Storage> resizing_;              // storage that the program is resizing now
    std::vector<Ref<Storage>> emptied_;  // storages that the program resized to zero bytes
    // While `torch.utils.swap_tensors` runs: records without their weak reference to a tensor
    // (`StorageRecord::origin`), each with that tensor.
    std::vector<std::pair<Ref<Storage>, c10::TensorImpl*>> tracking_suspended_;

public:
    // What the engine's destructor asks stands before the engine, so that it is destroyed after it:
    // the observers, the device, and the registry, to which it returns its records and recipes.
    Observers observers;
    Device device;
    Registry registry;
    // policy written in Python, which the engine owns; null: a built-in policy decides
    PythonChooser* const own_policy;
    Engine engine;
    Events events;
    Frees frees;
    Room room;
    Prices prices;
    // states of the random generators, so that a recomputation draws the same numbers
    RngHistory positions;

    // State for backward operators that write their result over their incoming gradient, which
    // saves one allocation; see dispatch/in_place.h.
    struct TakingOver final {
        // Backward operators may write their result over their incoming gradient. False only in
        // tests.
        bool allowed = true;
        // A recorded trace names the results that would be written over a gradient if Rekindle's
        // own dispatch mode were off.
        bool predicted = false;
        std::int64_t taken_over = 0;  // number of calls whose result was written over a gradient
        // For tests: the fewest references, without that of a boxed argument, seen to a gradient
        // whose storage had no owner but the autograd node and the running call.
        std::int64_t fewest = std::numeric_limits<std::int64_t>::max();
    };

    TakingOver taking_over;
    bool records_streams = false;  // the program called `record_stream`
    // the program has freed parameters that it may fill again, as FSDP does
    bool frees_parameters = false;
    // Longest permitted chain of recipes, each of which reads the result of the previous one. The
    // value at the end of a longer chain loses its recipe and stays in memory.
    std::int32_t longest_chain = 1'000;
    int never_recompute = 0;  // nesting depth of `rekindle.never_recompute()`
    InProgress in_progress;   // the operators that run now
    Readers readers;
    // Reads of tensors that Python code and the program's own functions announced, so that the
    // tensors are not evicted meanwhile. Python ends a read by its key.
    std::map<std::int64_t, std::unique_ptr<Reading>> noted;
    std::int64_t notes = 0;  // key of the last read in `noted`
    // Number of storages made so far (`storages_made`) at which `prune_history` next shortens long
    // chains of recipes.
    std::int64_t next_history_check = 1'000;
    bool evicts_held_last = false;  // user-held values may be evicted last (`evict="auto"`)

    std::vector<EvictHeldLast*> resorts;  // active scopes in which user-held values may be evicted
    std::unique_ptr<HeldEviction> held_eviction;  // null unless `evict="anything"`
    // object that recognizes repeated training steps; null: steps are not followed
    std::unique_ptr<StepObserver> steps;
    bool uses_arena = false;        // PyTorch's CPU allocations come from rekindle's arena
    std::atomic<int> rejoined = 0;  // how often other code had cleared the dispatch key (`rejoin`)

    // Sequence number of this driver in the process, counted from 1; never reused.
    const std::uint64_t ordinal;

    // -- storages -------------------------------------------------------------------------------

    // Start the budget: count the bytes that the device's allocator gave out before.
    void open();

    // Create the engine's entry for an operator call. `facts` is null if no operator of the program
    // made the outputs. Without `replayable` the call is never repeated to recompute its outputs.
    Recipe& new_call(const Facts* facts, Nanoseconds cost, bool replayable);
    // Create the record of a storage that `call` allocates, or of the new version of a storage that
    // `call` writes in place.
    StorageRecord& new_storage(Call& call, Bytes nbytes);
    // Report to the engine that the operator call `call` has run, and that it used `workspace`
    // bytes internally.
    void admit(Recipe& call, Bytes workspace = 0);
    // Report to the engine the cost and the workspace of an operator that allocated no storage.
    void account(const Facts& facts, Nanoseconds cost, Bytes workspace);
    // Report to the engine that an operator ran whose results get no record. Their bytes count
    // against the budget, but they are never evicted.
    void count(Nanoseconds cost, Bytes nbytes, Bytes workspace);
    // Return the record of the storage of `tensor`, or null if the tensor has no memory. A storage
    // that has no record gets one. It becomes a source: a value that cannot be recomputed.
    StorageRecord* find_or_register(const c10::TensorImpl& tensor);

    // Record that the operator call `call` writes the memory of `before` in place. Return the
    // record of the new version of the value. All saved-tensor handles then refer to the new
    // version.
    StorageRecord& record_inplace_write(Call& call, StorageRecord& before);
    // Record a write to the memory of `before` that no operator reports. The value of `before` has
    // a recipe. Return the record of the new version, which has no recipe, because the write cannot
    // be repeated.
    StorageRecord& record_external_write(StorageRecord& before);
    // Add a reference of autograd to `record`, and keep its memory alive by holding `storage_impl`.
    void retain(StorageRecord& record, const StoragePtr& storage_impl);
    // Prepare for a write to `record`, a value without a recipe that other recipes read. Recompute
    // the evicted values that need its current contents, and pin them (R4, sources).
    void forget(StorageRecord& record);
    // Pin the storage of `tensor`: it is never evicted.
    void keep(const c10::TensorImpl& tensor);
    // Count the memory of each of `tensors` against the budget from now on, unless it is counted
    // already. Throw `OutOfBudgetError`, before any is counted, if they do not fit together.
    void register_tensors(const std::vector<const c10::TensorImpl*>& tensors);
    // Record that `tensor`, a view, shares its version counter with other memory. After
    // `view.data = other` the view still has the counter of its base, so a bump no longer implies a
    // write to the base.
    void note_shared_version_counter(const c10::TensorImpl& tensor);

    // Make `tensor`, which an optimizer writes in every step, a source and pin it (R4, sources).
    // With a recipe, recomputing it would need the values of all earlier steps.
    void pin_as_constant(const c10::TensorImpl& tensor);
    // Recompute and pin all values whose recipes need the current contents of `tensor`, which is
    // about to be written (R4, sources).
    // Return true if there were such values.
    bool save_what_needs(const c10::TensorImpl& tensor);
    // Prepare for a resize of `storage_impl` to `nbytes`. newest: sequence number of an autograd
    // node, as for `leave` in gathered.h; negative if the program will not restore the contents.
    // Return true if `storage_impl` has a record.
    bool about_to_resize(c10::StorageImpl& storage_impl, Bytes nbytes, std::int64_t newest);
    // Finish the resize that `about_to_resize` announced.
    void has_been_resized();
    // Protect recipes that read `storage_impl` (R4, sources). The program is about to pass the
    // address to other code, such as NumPy, which may write there without any operator.
    void mark_externally_writable(c10::StorageImpl& storage_impl);
    // Prepare for one write to `storage_impl` by code that is no operator, such as `Tensor.apply_`.
    // Recompute and pin the values whose recipes need the old contents (R4, sources).
    void about_to_write_unseen(c10::StorageImpl& storage_impl);
    // The program has raised the version of the tensors in `storage_impl`
    // (`torch.autograd.graph.increment_version`), because it wrote there without an operator, or is
    // about to. Keep the values in memory that were computed from the old contents.
    void version_raised(c10::StorageImpl& storage_impl);
    // Find out which other storages share memory with `storage_impl`. Each of them counts as
    // external memory from then on. Return true if there is one.
    bool share_with_overlapping(c10::StorageImpl& storage_impl);
    // Return true if another storage shares the memory of `record`.
    bool overlaps(const StorageRecord& record) const;
    // Before an operator writes `record`: recompute and pin the values whose recipes need the old
    // contents of other storages that share its memory. Return true if there were such values.
    bool save_overlapping(StorageRecord& record);
    // Return the record of the private copy of the external memory of `record`, if the memory has
    // not changed since the copy was made, else null.
    StorageRecord* copy_still(StorageRecord& record);
    // Make a private copy of the external memory of `record`, for recipes to read. `storage_impl`
    // keeps the copy alive until a recipe refers to it.
    StorageRecord& copy_now(StorageRecord& record, StoragePtr& storage_impl);
    // Drop the runtime's weak reference to `tensor` until `resume_origin_tracking`, because
    // `torch.utils.swap_tensors` refuses tensors with weak references.
    void suspend_origin_tracking(const c10::TensorImpl& tensor);
    // `tensor` has other memory than `before` now (`tensor.data = ...`).
    void note_moved(const c10::TensorImpl& tensor, c10::StorageImpl& before);
    void resume_origin_tracking();
    // Drop the recipes of values, such as an RNN's state, that the program carries from one
    // autograd graph to the next. Otherwise their chain of recipes would grow forever.
    void prune_history();
    // Allow the engine to evict user-held values, except those that are being read. Return the
    // values that it may evict now.
    std::vector<Ref<Storage>> select_held();
    // Return true if `select_held` may allow eviction of `record`. `read` are storages that are
    // being read. If `but_saved`, values that autograd saved may be read as well, so they are not
    // evicted either.
    static bool is_evictable(const StorageRecord& record, const StorageList& read, bool but_saved);
    // Add all storages that are being read to `read`. Return true if some reader may also read any
    // value that autograd saved.
    bool note_all_read(StorageList& read) const;
    // Register `reader`. Until `ends`, the storages that it reads are not evicted.
    void begins(Reader& reader);

    void ends(Reader& reader) noexcept { readers.remove(reader); }

    // Exclude all user-held values from eviction. An operator is about to begin that may read any
    // of them.
    void stop_evicting_held();

    // Scope in which the counter `count` is one higher.
    class Counted final {
    public:
        explicit Counted(int& count) noexcept : count_(++count) {}

        Counted(const Counted&) = delete;
        Counted& operator=(const Counted&) = delete;
        Counted(Counted&&) = delete;
        Counted& operator=(Counted&&) = delete;

        ~Counted() { --count_; }

    private:
        int& count_;
    };

    // Restore `storage_impl` and keep it in memory while the program holds it. The program is about
    // to take its address, and code that uses the address cannot trigger a recomputation.
    void pin_exposed_address(c10::StorageImpl& storage_impl);
    // Exclude the value of `record`, which is in memory, from eviction while the program holds it.
    void pin_while_held(StorageRecord& record);
    // At the end of the budget, restore every user-held value that is evicted.
    void bring_all_back();

    // -- memory ---------------------------------------------------------------------------------

    // End the budget, and restore the evicted values that the program holds. From now on a freed
    // storage or a destroyed handle is processed at once, because no later operator call would
    // process it. That holds after an error too.
    void close();
    // Write into `snapshot` which storages hold memory. This visits every storage, so it is
    // expensive.
    void take_snapshot(Snapshot& snapshot, ProgramLine line);
    // Take the snapshot of the memory peak again, if memory in use has grown clearly since the last
    // such snapshot.
    void take_peak_snapshot(ProgramLine line);
    // Take a snapshot of the storages in memory now, and again at each new peak of `nbytes` or
    // more.
    void expect_peak(Bytes nbytes, ProgramLine line);
    // Return the tensors by which the program refers to values that are in memory and have a
    // record, the oldest first.
    std::vector<at::Tensor> program_tensors();
    // Return the bytes of the evicted values to which the program or autograd still refers.
    Bytes evicted_bytes() const;
    // Write into `snapshot` that the memory of `tensor`, if it has any, is of `kind`, such as a
    // gradient or an optimizer state.
    void add_owned(
        Snapshot& snapshot, const c10::TensorImpl& tensor, Owned::Kind kind, const void* parameter
    );
    // Remember that a module was given `tensor` as a parameter or as a buffer, for snapshots of
    // memory.
    void add_module_tensor(const c10::TensorImpl& tensor, bool parameter);

    std::size_t bytes_of_bookkeeping() const noexcept;
    // Check the invariants of the driver's tables, which hold between two events. Return the first
    // one violated, or null. For tests.
    const char* fault();

    // -- actions --------------------------------------------------------------------------------

    void compute(Call& call, bool in_place) override;
    void free(Storage& storage) override;
    bool swap_out(Storage& storage, bool keep) override;
    void swap_in(Storage& storage, bool early) override;
    void discard(Storage& storage) override;
    Bytes workspace(const Call& call) const noexcept override;
    void dispose(Storage& storage) noexcept override;
    void dispose(Call& call) noexcept override;

private:
    void wait_for_room(Call& call, bool in_place);
    void refuse_in_a_graph(const char* site) const;
    void find_places(const Recipe& recipe, bool in_place);
    void compute_now(Call& call, bool in_place);
    StreamIndex order_recomputation(const Recipe& recipe, bool in_place);
    void settle_results(
        Recipe& recipe, const c10::SmallVector<StoragePtr, 2>& storages, const Order& order
    );
    Order run(Recipe& recipe, bool in_place, c10::SmallVector<StoragePtr, 2>& storages);
    StorageRecord& known_at(AddressEntry found, c10::StorageImpl& storage_impl);
    StorageRecord* emptied_at(const c10::StorageImpl& storage_impl);
    StorageRecord& adopt(const c10::TensorImpl& tensor, c10::StorageImpl& storage_impl);
    StorageRecord& list(
        AddressEntry counted, const StoragePtr& storage_impl, const c10::TensorImpl* tensor
    );
    StorageRecord& make_source(
        const Facts* maker, const StoragePtr& storage_impl, const c10::TensorImpl* tensor
    );
    StorageRecord& new_contents_of(StorageRecord& record);
    void make_external(StorageRecord& record);
    void widen(StorageRecord& record, c10::StorageImpl& storage_impl);
    std::vector<Ref<Storage>> overlapping(c10::StorageImpl& storage_impl);
    void close_books() noexcept;
    bool is_long_lived_state(StorageRecord& record);
    std::exception_ptr restore_all_placeholders();
    void use_in_any_case(StorageRecord& record);
    AllocationId allocation_of(const c10::TensorImpl& tensor);
    void add_gradient(Snapshot& snapshot, const at::Tensor& leaf);
    void add_tensors_of_modules(Snapshot& snapshot);
    void add_storage(Snapshot& snapshot, StorageRecord& record);
};

// Return the driver of the active budget if this thread works within that budget, else null. A
// thread that joined an earlier budget does not. Any thread may call this function, without the
// session mutex.
c10::intrusive_ptr<Driver> active();
// Take the session mutex, and return the driver for an operator with the dispatch keys `keys`. The
// caller must then release the mutex. If the operator runs outside any budget, release the mutex
// and return null.
c10::intrusive_ptr<Driver> lock_and_see(c10::DispatchKeySet keys);
// Tell all drivers that the program has given `tensor` other memory (`tensor.data = ...`).
void tensor_moved(const c10::TensorImpl& tensor, c10::StorageImpl& before);
// Return true if any driver exists, also one whose budget has ended. Needs no mutex.
bool any_drivers() noexcept;
// Make this Python thread work within the budget of `driver`, so that its operators pass Rekindle's
// dispatch key; null: within no budget.
void join(const Driver* driver) noexcept;
// Include the key again if other code has cleared it. Return true if this thread includes it now.
bool rejoin();
// Make `driver` the one active budget of this process; null: no budget is active.
void set_active(c10::intrusive_ptr<Driver> driver);
// Return the number of drivers in this process, also of ended budgets whose graphs still exist.
std::size_t drivers_alive() noexcept;
// Return true if no thread that the program started inside the budget has run a backward pass.
bool gradients_stay();
// Return true if only the thread that entered the budget may take a snapshot of the memory peak.
bool looks_later();

}  // namespace rekindle
