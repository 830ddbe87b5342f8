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
#include <chrono>
#include <cstdint>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../base/address_map.h"
#include "../base/slab.h"
#include "../engine/engine.h"
#include "../engine/frame.h"
#include "../engine/performer.h"
#include "../engine/samples.h"
#include "../ops/errors.h"
#include "../ops/prices.h"
#include "../torch/device.h"
#include "../torch/free_queue.h"
#include "../torch/rng_history.h"
#include "../torch/storage_ptr.h"
#include "budget_backoff.h"
#include "readers.h"
#include "recipe.h"
#include "reserved.h"
#include "snapshot.h"
#include "step_observer.h"
#include "storage_record.h"
#include "transcript.h"

namespace rekindle {

class HeldEviction;
class Audit;
class EvictHeldLast;
class PythonChooser;  // NOLINT(cppcoreguidelines-virtual-class-destructor): it is final
class Reading;
class Swapper;

// The state of one budget, and the performer of its engine's actions.
class Driver final : public c10::intrusive_ptr_target, public Performer {
public:
    // where: the device whose memory the budget limits. assumed: the user did not give `where`; a
    // program that uses another device is refused. learns: whether the policy follows learned
    // plans. own: a policy written in Python that replaces `policy`; null: none.
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

    // Entry of the address table for one storage. Without a record, only the storage's bytes count
    // against the budget: it can be neither evicted nor recomputed.
    struct AddressEntry final {
        StorageRecord* record = nullptr;
        Bytes nbytes = 0;
        const Facts* maker = nullptr;
        const c10::StorageImpl* storage_impl = nullptr;  // set if it lacks our deleter hook
        AllocationId allocation = 0;
    };

    // A storage without our deleter hook. The driver polls the weak pointer to notice when PyTorch
    // frees the storage.
    struct UntrackedStorage final {
        const void* address;
        WeakStorage storage_impl;
    };

    // Operator calls whose results are never evicted, because a trial run gave other bits or had
    // side effects. Grouped by operator and reason.
    struct Kept final {
        const Facts* facts;
        std::string why;
        std::int64_t calls;
        Bytes nbytes;  // bytes of the results of these calls
    };

private:
    // Allocators of records and recipes. Declared before the engine, because the engine's
    // destructor returns its records and recipes to them.
    Slab<StorageRecord> records_;
    Slab<Recipe> recipes_;
    AddressMap<AddressEntry> table_;            // the address table: storages by address
    std::vector<const void*> dead_addresses_;   // buffer of `drain_free_queue`
    std::vector<StorageRecord*> dead_handles_;  // their handle was destroyed; not processed yet
    std::vector<Ref<Storage>> gone_;            // their memory was freed; not processed yet
    std::vector<UntrackedStorage> untracked_;   // the storage seen last is at the end
    std::size_t poll_untracked_at_ = YOUNGEST;  // size of `untracked_` at its next poll
    // Polling found freed storages, and the device's allocator was not queried since.
    bool late_frees_found_ = false;
    // Freed bytes of storages without a record, not yet reported to the engine.
    Bytes freed_counted_ = 0;
    // Linked list of records with a recipe that variables of the program may hold (R1, ownership).
    StorageRecord* first_held_ = nullptr;
    StorageRecord* last_held_ = nullptr;
    std::vector<Storage*> unrecomputable_;  // buffer of `perform`
    OpId next_op_ = 0;
    Ref<Storage> resizing_;              // storage that the program is resizing now
    std::vector<Ref<Storage>> emptied_;  // resized to zero bytes by the program
    // Records that do not follow their tensor during `torch.utils.swap_tensors`, with that tensor.
    std::vector<std::pair<Ref<Storage>, c10::TensorImpl*>> tracking_suspended_;
    // Values restored into the program's own storage. The driver still holds a reference to that
    // storage, which `hand_back` drops.
    std::vector<Ref<Storage>> back_;
    // A pseudo storage for bytes that the device's allocator gave out in addition to known
    // storages: no operator reported them, or the allocator rounded sizes up.
    Ref<Storage> outside_;
    std::vector<c10::Device> devices_met_;  // devices whose memory the program used
    bool assumed_;                          // the user did not name the device
    AllocationId allocations_ = 0;          // number of the last allocation
    // Once more bytes than this are in use, `peak_snapshot` must be taken again.
    Bytes peak_threshold_ = 0;
    // From this many bytes on, every new peak gets a snapshot.
    Bytes exact_from_ = std::numeric_limits<Bytes>::max();
    std::vector<ModuleTensor> module_tensors_;  // parameters and buffers of modules
    // When `module_tensors_` has grown to this size, entries of destroyed tensors are removed.
    std::size_t module_tensors_at_most_ = 64;

public:
    PythonChooser* const own_policy;  // owned by the engine; null: a built-in policy decides
    Engine engine;
    Device device;
    BudgetBackoff backoff;
    Reserved reserved{*this};
    Prices prices;
    FreeQueue free_queue;  // freed storages and destroyed handles, not processed yet
    RngHistory positions;  // states of the random generators, for replays

    // State of backward operators that write their result over their incoming gradient; see
    // dispatch/in_place.h.
    struct TakingOver final {
        bool allowed = true;  // false in tests
        // Traces name results that would be written over a gradient if rekindle's own dispatch mode
        // were off.
        bool predicted = false;
        std::int64_t taken_over = 0;  // calls whose result was written over a gradient
        // For tests: smallest reference count seen of a gradient whose storage had no other owner.
        std::int64_t fewest = std::numeric_limits<std::int64_t>::max();
    };

    TakingOver taking_over;
    bool records_streams = false;  // the program called `record_stream`
    std::int64_t evictions = 0;  // values evicted so far, without those that nothing can use again
    std::int64_t recomputations = 0;
    Nanoseconds lost_ns = 0;  // time spent choosing, evicting and recomputing
    int losing = 0;           // nesting depth of `lose`
    std::chrono::steady_clock::time_point losing_since;  // start of the outermost `lose`
    // Number of recomputations at which Python next checks whether they take too much time.
    std::int64_t look_at_losses_at = 10'000;
    std::int64_t storages_made = 0;
    // Longest permitted chain of recipes. The value at the end of a longer chain loses its recipe
    // and stays in memory as a source.
    std::int32_t longest_chain = 1'000;
    std::vector<Kept> kept_calls;     // by operator and reason
    bool count_again = false;         // tests: list recomputed operators in `again`
    std::vector<const Facts*> again;  // operators recomputed so far, if tests set `count_again`
    int never_recompute = 0;          // nesting depth of `rekindle.never_recompute()`
    Samples samples;                  // memory in use over time
    int watched = 0;           // running operators whose side effects are observed (`Effects`)
    int running = 0;           // operators that run now, as first run or as recomputation
    std::uint64_t begun = 0;   // operators started so far
    int reading_anything = 0;  // running operators that may read any memory of the program
    int lending = 0;           // threads that may evict user-held values now, as a last resort
    int replaying = 0;         // recomputations that run now
    Readers readers;
    // Reads by Python code and by the program's own functions. The key is the number that Python
    // got for the read.
    std::map<std::int64_t, std::unique_ptr<Reading>> noted;
    std::int64_t notes = 0;  // number of the last read in `noted`
    Snapshot peak_snapshot;
    bool peak_snapshot_due = false;  // memory in use is 2 % above that at `peak_snapshot`
    bool samples_due = false;        // `samples` is full: Python should fetch the samples
    bool owners_due = false;         // `met` is not empty: Python should look up the owning models
    std::vector<const void*> met;    // storages of weights that were seen for the first time
    bool tell_ranges = false;        // an optimizer step that can be undone runs: report ranges
    bool stepping = false;           // an optimizer step runs: evict nothing for workspaces
    // Value of `storages_made` at which `prune_history` runs next.
    std::int64_t next_history_check = 1'000;
    bool evict_before_every_op = false;  // for tests
    bool lends = false;    // user-held values may be evicted as a last resort (`evict="auto"`)
    int placeholders = 0;  // user-held values that are evicted now

    std::unique_ptr<Audit> audit;  // compares recomputed values with the first ones; null: off
    std::vector<EvictHeldLast*> resorts;  // active scopes that permit evicting user-held values
    std::unique_ptr<HeldEviction> held_eviction;  // null unless `evict="anything"`
    std::unique_ptr<StepObserver> steps;          // null: the steps of the program are not followed
    std::unique_ptr<Swapper> swapper;             // null: nothing is swapped
    // While a recording is active, every storage gets a record.
    Transcriber transcriber{engine.journal};
    std::map<std::int64_t, Transcript> transcripts;  // recordings that Python started, by number
    // The whole run is recorded. Recipes are never dropped then, because a trace has no event for
    // that.
    bool recorded = false;
    bool uses_arena = false;  // PyTorch's CPU allocations come from rekindle's arena
    // Report every operator to Python, which notes the current line of the program.
    bool notes_places = false;
    bool places_due = false;  // operators ran that Python was not notified of yet

    // For tests: number of operators, recomputations and optimizer steps until one fails with
    // `OutOfBudget`; negative: never. Operators inside an optimizer step do not fail, because room
    // for the step is made at its start. In steps that can be undone operators do fail.
    std::int64_t refuse_in = -1;

    void refuse_for_tests(const char* who) {
        if (refuse_in < 0 || (stepping && !tell_ranges)) {
            return;
        }
        --refuse_in;
        if (refuse_in < 0) {
            throw OutOfBudgetError{1, engine.memory, engine.budget, who};
        }
    }

    int interrupt_in = -1;  // for tests: recomputations until one fails; negative: never
    bool interrupt_before = false;

    // The id by which Python knows this driver.
    std::ptrdiff_t number() const noexcept { return reinterpret_cast<std::ptrdiff_t>(this); }

    // Sequence number of this driver in the process, counted from 1; never reused.
    const std::uint64_t ordinal;

    // Start swapping values to the host. `copies` is the Python object that stores them.
    void swap_with(const Swap& swap, struct _object* copies);
    // Bind the evicted `record` to `storage_impl`, which has the contents of the value.
    void attach_storage(StorageRecord& record, const StoragePtr& storage_impl);

    // -- storages -------------------------------------------------------------------------------

    // Start the budget: count the bytes that the device's allocator has already given out.
    void open();
    // Return the bytes of `storage_impl` as the allocator rounds them, or 0 if it is not on the
    // budget's device.
    Bytes counted(const c10::StorageImpl& storage_impl);
    // Return true if `storage_impl` is on the budget's device.
    bool counts(const c10::StorageImpl& storage_impl);

    // Return the devices whose memory the program has used so far.
    const std::vector<c10::Device>& devices_met() const noexcept { return devices_met_; }

    // Create the engine's entry for an operator call. `facts` is null if no operator of the program
    // made the values.
    Recipe& new_call(const Facts* facts, Nanoseconds cost, bool replayable);
    // Create the record of a storage that `call` makes, or of the new version of a storage that it
    // writes.
    StorageRecord& new_storage(Call& call, Bytes nbytes);
    // Report to the engine that `call` ran, using `workspace` bytes internally.
    void admit(Recipe& call, Bytes workspace = 0);
    // Report to the engine an operator that made no storage.
    void account(const Facts& facts, Nanoseconds cost, Bytes workspace);
    // Report to the engine an operator whose results are counted but get no record.
    void count(Nanoseconds cost, Bytes nbytes, Bytes workspace);
    // Note that the program refers to the value of `record` by `tensor`.
    static void remember(StorageRecord& record, const c10::TensorImpl& tensor);
    // Return the entry for the address of `storage_impl`, or null.
    AddressEntry* find_by_address(const c10::StorageImpl& storage_impl) noexcept;
    // Return the record of the storage of `tensor`. A storage without a record becomes a source.
    // Return null if the tensor has no memory.
    StorageRecord* find_or_register(const c10::TensorImpl& tensor);

    // Call `visit(address, nbytes)` for each storage that has no record.
    template <class F>
    void each_counted(F&& visit) {
        table_.each([&](const void* address, const AddressEntry& resident) {
            if (resident.record == nullptr) {
                visit(address, resident.nbytes);
            }
        });
    }

    // Count one more call of an operator whose results are never evicted because of its trial.
    void note_kept(const Facts& facts, const std::string& why, Bytes nbytes);
    // Count the bytes of `storage_impl` without giving it a record. Return the bytes, or 0 if they
    // were counted before.
    Bytes count(c10::StorageImpl& storage_impl, const Facts* maker);
    // Bind `record` to `storage_impl`, which has the value from now on.
    void bind_storage(StorageRecord& record, const StoragePtr& storage_impl);
    // Detach the memory of `record` and return it. The caller becomes the only owner of the memory.
    StoragePtr take_storage(StorageRecord& record);
    // Transfer the memory of `before` to `after`, its next version.
    void transfer_storage(StorageRecord& before, StorageRecord& after);
    // Redirect all handles of autograd from `before` to `after`.
    void redirect_references(StorageRecord& before, StorageRecord& after);
    // Record that `call` writes the memory of `before` in place. Return the record of the new
    // version, to which all handles are redirected.
    StorageRecord& record_inplace_write(Call& call, StorageRecord& before);
    // Record a write to `before` that no operator reports. `before` has a recipe. Return the record
    // of the new version, which has no recipe.
    StorageRecord& record_external_write(StorageRecord& before);
    // Add a reference of autograd to `record`, and hold its memory in `storage_impl`.
    void retain(StorageRecord& record, const StoragePtr& storage_impl);
    // Make `record` resident for the program, recomputing it if necessary.
    void use(StorageRecord& record);
    // Make `record` resident and never evict it again.
    void pin(StorageRecord& record);
    // Drop the recipe of `record`, which is resident: it becomes a source.
    void seal(StorageRecord& record);
    // Before a write to the source `record`: recompute and pin the evicted values that need its
    // current contents (R4, sources).
    void forget(StorageRecord& record);
    // Update the size and address of `record`: the program may have resized its storage.
    void resized(StorageRecord& record);
    // Pin the storage of `tensor`.
    void keep(const c10::TensorImpl& tensor);
    // Count the memory of `tensor` from now on, unless it is counted already.
    void register_tensor(const c10::TensorImpl& tensor);
    // Note that `tensor`, a view, shares its version counter with other memory. After `view.data =
    // other` the view still has the counter of its base, so a bump no longer implies a write to the
    // base.
    void note_shared_version_counter(const c10::TensorImpl& tensor);

    // Make `tensor`, which an optimizer writes in every step, a source and pin it (R4). With a
    // recipe, recomputing it would need the values of all earlier steps.
    void pin_as_constant(const c10::TensorImpl& tensor);
    // Recompute and pin all values that need the current contents of `tensor` (R4, sources).
    void save_what_needs(const c10::TensorImpl& tensor);
    // Prepare for a resize of `storage_impl` to `nbytes`. Return true if `storage_impl` has a
    // record.
    bool about_to_resize(c10::StorageImpl& storage_impl, Bytes nbytes);
    // Finish the resize that `about_to_resize` announced.
    void has_been_resized();
    // Protect recipes that read `storage_impl` from writes by other code (R4), because its address
    // leaves PyTorch.
    void mark_externally_writable(c10::StorageImpl& storage_impl);
    // Return the private copy of the external memory of `record` if the contents are unchanged,
    // else null.
    StorageRecord* copy_still(StorageRecord& record);
    // Make a private copy of the external memory of `record`. `storage_impl` keeps the copy alive
    // until a recipe refers to it.
    StorageRecord& copy_now(StorageRecord& record, StoragePtr& storage_impl);
    // Note the checksum of the weight `record`, which recipes start to read. A recomputation
    // compares it.
    static void note_checksum(StorageRecord& record);
    // Drop our weak reference to `tensor` until `resume_origin_tracking`, because
    // `torch.utils.swap_tensors` refuses tensors with weak references.
    void suspend_origin_tracking(const c10::TensorImpl& tensor);
    void resume_origin_tracking();
    // Find freed storages among those without a deleter hook, or only among the `youngest` of them.
    void poll_untracked(bool youngest = false);
    // Drop the recipes of values that the program carries from one autograd graph to the next.
    void prune_history();
    // Release sources kept only to recompute values that are resident. Return true if memory was
    // freed.
    bool release_recompute_sources();
    // Return true if the recipe of `record` may be dropped: every other output of the same calls is
    // resident, or nothing can use it again.
    bool may_forget(StorageRecord& record);
    // Make the user-held values that are not being read candidates for eviction. Return those
    // values.
    std::vector<Ref<Storage>> select_held();
    // Return true if `select_held` may make `record` a candidate. `read`: storages that are being
    // read; `but_saved`: values that autograd saved may be read as well.
    static bool can_be_lent(const StorageRecord& record, const StorageList& read, bool but_saved);
    // Add all storages that are being read to `read`. Return true if some reader may also read
    // values that autograd saved.
    bool note_all_read(StorageList& read) const;
    // Register `reader`, and exclude the storages that it reads from eviction, until `ends`.
    void begins(Reader& reader);

    void ends(Reader& reader) noexcept { readers.remove(reader); }

    // Exclude all user-held values from eviction: an operator begins that may read any of them.
    void stops_lending();

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

    // Restore the contents of `storage_impl` if it is a placeholder.
    void bring_back(const c10::StorageImpl& storage_impl);
    // Restore `storage_impl` and keep it resident while the program holds it, because its address
    // leaves PyTorch.
    void pin_exposed_address(c10::StorageImpl& storage_impl);
    // Do not evict the resident `record` while the program holds it.
    void pin_while_held(StorageRecord& record);
    // Restore all placeholders, at the end of the budget.
    void bring_all_back();
    // Take a strong reference to the memory of `record`.
    void own(StorageRecord& record);
    // Drop our strong reference to the memory of `record` if nothing needs it any more.
    void disown(StorageRecord& record);

    // -- memory ---------------------------------------------------------------------------------

    // Return the bytes to leave free on a device for an allocation of `needed` bytes; 0 for small
    // ones. An allocation error in the small ones could interrupt code that cannot recover, such as
    // `capture_begin` while it sets a generator's state.
    Bytes kept_back(Bytes needed) const noexcept {
        constexpr Bytes small = Bytes{4} << 10;
        constexpr Bytes most = Bytes{64} << 10;
        const bool keeps = device.queues() && device.keeps_back && needed > small;
        return keeps ? std::min(most, engine.budget >> 10) : 0;
    }

    // Run `events` and add its duration to `lost_ns`.
    template <class F>
    void lose(F&& events);
    // Evict until `needed` bytes fit. Throws `OutOfBudgetError` if that is impossible.
    void make_room(Bytes needed, const char* who);
    // Evict until `wanted` bytes fit or nothing evictable is left.
    void clear(Bytes wanted);
    // Wait until no copy to the host is in flight.
    void wait_for_copies() const;
    // Evict every value that may be evicted.
    void evict_all();
    // Find out which values the program no longer holds. Must not be called during an action of the
    // engine.
    void poll();
    // Recover from the device OOM `out`, which happened although the budget had room. Evict more
    // and more, and run `attempt` again after each stage: neighbors in memory, `needed` bytes, four
    // times as much, everything. The next operator would fail like this one, so the budget is
    // lowered to the bytes that did fit.
    template <class F>
    void rescue(Bytes needed, const std::exception& out, F&& attempt);
    // Evict the cheapest neighbors in memory to free `nbytes` in one piece on the device. Return
    // true if something was evicted.
    bool evict_neighbors(Bytes nbytes);
    // Free a block of `nbytes` on the device in the cheaper of two ways: evict neighbors, or evict
    // whole segments of `missing` bytes in all. The caller returns whole segments to the device.
    Way evict_for_place(Bytes nbytes, Bytes missing, Segments segments);

    // Call `visit(address, nbytes)` for each storage without a deleter hook on the device.
    template <class F>
    void each_on_device(F&& visit) const {
        for (const UntrackedStorage& each : untracked_) {
            const StoragePtr storage_impl = each.storage_impl.lock();
            if (storage_impl && storage_impl->device() == device.which() &&
                storage_impl->data() != nullptr) {
                const auto address = reinterpret_cast<std::uintptr_t>(storage_impl->data());
                visit(
                    static_cast<Bytes>(address),
                    device.rounded(static_cast<Bytes>(storage_impl->nbytes()))
                );
            }
        }
    }

    // Drain the queue of freed storages: remove their addresses from the address table.
    // `process_pending` reports them to the engine later. Must be called before a look-up in the
    // table.
    void drain_free_queue();
    // Process everything that happened since the last call: dead handles, freed memory.
    void process_pending();

    void process_pending_if_needed() {
        const bool collected = !dead_handles_.empty() || !gone_.empty() || freed_counted_ != 0;
        const bool more =
            !back_.empty() || untracked_.size() > poll_untracked_at_ || has_discarded();
        if (free_queue.any() || collected || more) {
            process_pending();
        }
    }

    // Return true if `drain_free_queue` found freed memory that was not yet reported to the engine.
    bool any_gone() const noexcept { return !gone_.empty(); }

    // Return true if some of that freed memory belonged to a value that is locked in the engine.
    bool any_locked_is_gone() const noexcept {
        return std::ranges::any_of(gone_, [](const Ref<Storage>& each) {
            return each->locks != 0;
        });
    }

    // Prepare for an operator of the program on the stream `now`. Return the index of that stream.
    StreamIndex about_to_run(const std::optional<c10::Stream>& now) {
        const StreamIndex here = device.see(now);
        process_pending_if_needed();
        if (transcriber.writes()) {
            poll();  // a trace needs the time at which the program frees a value
        }
        return here;
    }

    // Before `needed` more bytes make a new peak, process freed storages, so that they do not
    // count.
    void about_to_peak(Bytes needed) {
        if (device.queues() && needed > engine.peak - engine.memory) {
            poll_untracked(true);
            process_pending_if_needed();
        }
    }

    // End the budget. From now on freed storages and handles are processed at once, because no
    // operator follows.
    void close();
    // Start to record events into `transcript`, which first lists the storages that exist now.
    void begin(Transcript& transcript);
    // Write into `snapshot` which storages hold memory. Visits every storage, so it is expensive.
    void take_snapshot(Snapshot& snapshot, ProgramLine line);
    // Take `peak_snapshot` again if more memory is in use than at the last snapshot.
    void take_peak_snapshot(ProgramLine line);
    // Take a snapshot of the peak now, and again at each new peak of `nbytes` or more.
    void expect_peak(Bytes nbytes, ProgramLine line);
    // Return tensors of the program that refer to resident values with a record, the oldest first.
    std::vector<at::Tensor> program_tensors();
    // Return the bytes of evicted values that the program or autograd still refers to.
    Bytes evicted_bytes() const;
    // Note in `snapshot` that `tensor` is of `kind`, if it has memory.
    void add_owned(
        Snapshot& snapshot, const c10::TensorImpl& tensor, Owned::Kind kind, const void* parameter
    );
    // Note that a module was given `tensor` as a parameter or as a buffer.
    void add_module_tensor(const c10::TensorImpl& tensor, bool parameter);

    // Return the number of calls so far.
    OpId operators() const noexcept { return next_op_; }

    std::size_t bytes_of_bookkeeping() const noexcept;

    // Return the number of records and recipes that exist.
    std::size_t alive() const noexcept { return records_.alive() + recipes_.alive(); }

    // -- actions --------------------------------------------------------------------------------

    // Run `events`, which call the engine. Then hold the memory of values that have lost their
    // recipe.
    template <class F>
    void perform(F&& events, const char* who = "");
    // Like `perform`, for events that may recompute. Run `events` again if the program has freed an
    // input meanwhile.
    template <class F>
    void bring(F&& events);
    template <class F>
    void bring_once_more(F&& events);
    void compute(Call& call, bool in_place) override;
    void free(Storage& storage) override;
    bool swap_out(Storage& storage, bool keep) override;
    void swap_in(Storage& storage) override;
    void discard(Storage& storage) override;
    Bytes workspace(const Call& call) const noexcept override;
    void dispose(Storage& storage) noexcept override;
    void dispose(Call& call) noexcept override;

private:
    // Number of storages to poll frequently: most freed storages were made recently.
    static constexpr std::size_t YOUNGEST = 64;

    // Return true if there are copies on the host to free.
    bool has_discarded() const noexcept {
        return engine.host != nullptr && !engine.host->discarded.empty();
    }

    // Run `events` while the engine treats every transfer as finished.
    void act(c10::function_ref<void()> events) const;
    void evict_for(Bytes needed, const char* who);
    void make_room_and_wait(Bytes needed, const char* who);
    void wait_for_room(Call& call, bool in_place);
    void refuse_in_a_graph(const char* site) const;
    void find_places(const Recipe& recipe, bool in_place);
    std::unordered_map<Bytes, Storage*> price(Segments& segments);
    void compute_now(Call& call, bool in_place);
    StreamIndex order_recomputation(const Recipe& recipe, bool in_place);
    void settle_results(
        Recipe& recipe, const c10::SmallVector<StoragePtr, 2>& storages, const Order& order
    );
    bool may_drop(const StorageRecord& record) const;
    Order run(Recipe& recipe, bool in_place, c10::SmallVector<StoragePtr, 2>& storages);
    void poll_held();
    bool ask_allocator();
    void look_at_all();
    void drop_address(const void* address, AddressEntry resident);
    void let_home_go(StorageRecord& record);
    void note_freed_counted(const void* address, Bytes nbytes) noexcept;
    StorageRecord& known_at(AddressEntry found, c10::StorageImpl& storage_impl);
    StorageRecord* emptied_at(const c10::StorageImpl& storage_impl);
    StorageRecord& adopt(const c10::TensorImpl& tensor, c10::StorageImpl& storage_impl);
    StorageRecord& list(
        AddressEntry counted, const StoragePtr& storage_impl, const c10::TensorImpl* tensor
    );
    StorageRecord& make_source(
        const Facts* maker, const StoragePtr& storage_impl, const c10::TensorImpl* tensor
    );
    static void describe(StorageRecord& record, const c10::TensorImpl& tensor);
    void vacate(StorageRecord& record);
    void release(StorageRecord& record);
    void let_go_of_idle();
    void maybe_held(StorageRecord& record);
    void not_held(StorageRecord& record) noexcept;
    bool is_long_lived_state(StorageRecord& record);
    void gone(StorageRecord& record);
    bool evict_keeping_placeholder(StorageRecord& record);
    StoragePtr detach_placeholder(StorageRecord& record);
    void arrive(
        StorageRecord& record, const StoragePtr& storage_impl, const StoragePtr& placeholder
    );
    void hand_back(StorageRecord& record);
    std::exception_ptr restore_all_placeholders();
    void use_in_any_case(StorageRecord& record);
    void note_memory();
    void settle_at(
        const void* address,
        StorageRecord* record,
        Bytes nbytes,
        const Facts* maker,
        const c10::StorageImpl* storage_impl
    );
    AllocationId allocation_of(const c10::TensorImpl& tensor);
    void add_gradient(Snapshot& snapshot, const at::Tensor& leaf);
    void add_tensors_of_modules(Snapshot& snapshot);
    void add_storage(Snapshot& snapshot, StorageRecord& record);

    unsigned ticks_ = 0;  // number of calls of `process_pending`
};

template <class F>
void Driver::rescue(Bytes needed, const std::exception& out, F&& attempt) {
    const Bytes at_first = engine.memory;
    const bool known = reserved.limited();
    reserved.turned_out(device.most_reserved());
    std::string said = message_of(out);
    bool lowers = known || !device.finds_places;
    const auto fits = [&] {
        wait_for_copies();
        const Bytes now = engine.memory + engine.in_flight + needed;
        try {
            attempt();
            backoff.fitted(
                lowers ? std::max(now, at_first / 2 + needed) : UNLIMITED, engine.budget
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
    if (evict_neighbors(piece) && fits()) {
        return;
    }
    lowers = true;
    const Bytes before = engine.memory;
    const Bytes step = backoff.step(needed, before);
    for (const Bytes most : {before - step, before - 4 * step, Bytes{-1}}) {
        ask_allocator();
        poll_held();
        perform([&] { engine.shrink(most); });
        device.empty_cache();
        if (fits()) {
            return;
        }
    }
    throw DeviceOutOfMemoryError(said);
}

template <class F>
void Driver::perform(F&& events, const char* who) {
    try {
        act(events);
    } catch (const NoRoom& shortage) {
        const bool nobody = *who == '\0' && shortage.call;
        throw OutOfBudgetError(
            shortage.needed,
            shortage.memory,
            shortage.budget,
            nobody ? recipe_of(*shortage.call).name() : who
        );
    }
    engine.take_unrecomputable(unrecomputable_);
    for (Storage* source : unrecomputable_) {  // hold values without a recipe
        own(record_of(*source));
    }
    unrecomputable_.clear();
}

template <class F>
void Driver::lose(F&& events) {
    using Clock = std::chrono::steady_clock;
    if (losing++ == 0) {
        losing_since = Clock::now();
    }
    // Another thread may have entered `lose` while the session mutex was released.
    const auto over = [&] {
        if (--losing == 0) {
            lost_ns += std::chrono::nanoseconds(Clock::now() - losing_since).count();
        }
    };
    try {
        events();
    } catch (...) {
        over();
        throw;
    }
    over();
}

// Terminates: each retry needs a value that the program freed meanwhile, and each dies once.
template <class F>
void Driver::bring_once_more(F&& events) {
    for (std::size_t left = engine.n_storages();; --left) {
        look_at_all();
        try {
            perform(events);
            return;
        } catch (const MissingInputError&) {
            if (left == 0) {
                throw;
            }
        }
    }
}

template <class F>
void Driver::bring(F&& events) {
    try {
        perform(events);
    } catch (const MissingInputError&) {
        bring_once_more(events);
    } catch (const OutOfBudgetError&) {
        if (!backoff.as_given(engine.budget)) {
            throw;
        }
        const BudgetBackoff::ScopedNoBackoff insisting(backoff);
        perform(events);
    }
}

// Return the driver of the active budget, if this thread belongs to it; null otherwise. A thread
// that joined an earlier budget does not. Any thread may call this function without the session
// mutex.
c10::intrusive_ptr<Driver> active();
// Return the driver for an operator with `keys`, with the session mutex held for the caller to
// adopt. Return null, with the mutex released, if the operator is outside any budget.
c10::intrusive_ptr<Driver> lock_and_see(c10::DispatchKeySet keys);
// Make this Python thread work within the budget of `driver`; null: within no budget.
void join(const Driver* driver) noexcept;
// Make `driver` the active one of this process; null: none.
void set_active(c10::intrusive_ptr<Driver> driver);
// Return true if no other thread may free a gradient now, because no thread started inside the
// budget has run a backward pass.
bool gradients_stay();
// Return true if this thread must leave a peak snapshot to the thread that entered the budget,
// because only that thread can read gradients safely.
bool looks_later();

}  // namespace rekindle
