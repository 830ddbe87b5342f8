// Performs the engine's actions on torch's memory, and tells it what became of that memory.
//
// Everything here is about storages; what operators and autograd do with them is for the runtime.
// All of it needs the core's lock, but for what says otherwise.
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

#include "../base/addresses.h"
#include "../base/slab.h"
#include "../engine/engine.h"
#include "../engine/frame.h"
#include "../engine/performer.h"
#include "../engine/samples.h"
#include "../ops/errors.h"
#include "../ops/prices.h"
#include "../torch/deaths.h"
#include "../torch/device.h"
#include "../torch/homes.h"
#include "../torch/positions.h"
#include "reader.h"
#include "recipe.h"
#include "record.h"
#include "reserved.h"
#include "shortfall.h"
#include "snapshot.h"
#include "step_observer.h"
#include "transcript.h"

namespace rekindle {

class AnyTime;
class Audit;
class LastResort;
class PythonChooser;  // NOLINT(cppcoreguidelines-virtual-class-destructor): it is final
class Reading;
class Swapper;

class Driver final : public c10::intrusive_ptr_target, public Performer {
public:
    // `assumed`: nobody said that it is `where`; a program that goes elsewhere is stopped.
    // `learns`: what steps of the program are like, and follows what was learned. `own`: chooses in
    // the place of `policy`, if there is one.
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

    // What lives at an address: a record, or what is only counted.
    struct Resident final {
        Record* record = nullptr;
        Bytes nbytes = 0;
        const Facts* maker = nullptr;
        const c10::StorageImpl* home = nullptr;  // if nobody tells when its memory goes
        AllocationId allocation = 0;
    };

    // Memory whose end nobody tells of.
    struct Unheard final {
        const void* address;
        WeakHome home;
    };

private:
    // Before the engine, which disposes of all it knows when it goes.
    Slab<Record> records_;
    Slab<Recipe> recipes_;
    Addresses<Resident> table_;
    std::vector<const void*> dead_addresses_;
    std::vector<Record*> dead_handles_;
    std::vector<Ref<Storage>> gone_;  // what lived where memory is gone
    std::vector<Unheard> unheard_;    // the youngest last
    std::size_t look_at_unheard_at_ = YOUNGEST;
    bool heard_late_ = false;  // of some of them, and nobody has acted on it
    Bytes uncounted_ = 0;
    Record* first_held_ = nullptr;  // replayable, and maybe kept by the program (R1)
    Record* last_held_ = nullptr;
    std::vector<Storage*> bereft_;
    OpId next_op_ = 0;
    Ref<Storage> resizing_;
    std::vector<Ref<Storage>> emptied_;  // resized to no bytes, for the time being
    std::vector<std::pair<Ref<Storage>, c10::TensorImpl*>> stepped_back_;
    std::vector<Ref<Storage>> back_;  // what had a husk, and nobody has looked at since
    Ref<Storage> outside_;  // what a device's allocator gave out to no operator, or to round blocks
    std::vector<c10::Device> devices_met_;
    bool assumed_;
    AllocationId allocations_ = 0;  // how many were numbered
    Bytes peak_threshold_ = 0;      // memory at which `peak_snapshot` is out of date
    // From here on each new peak has a snapshot.
    Bytes exact_from_ = std::numeric_limits<Bytes>::max();
    std::vector<ModuleTensor> module_tensors_;
    std::size_t module_tensors_at_most_ = 64;  // before those that are gone are removed

public:
    PythonChooser* const own_policy;  // the engine's; null: it has one of ours
    Engine engine;
    Device device;
    Shortfall shortfall;
    Reserved reserved{*this};
    Prices prices;
    Deaths deaths;
    Positions positions;
    std::int64_t evictions = 0;  // of what somebody may still ask for
    std::int64_t recomputations = 0;
    Nanoseconds lost_ns = 0;  // the clock's time in choosing, evicting and recomputing
    int losing = 0;           // how many of those go on, one within the other
    std::chrono::steady_clock::time_point losing_since;  // when the first of them began
    // Recomputations after which Python looks whether they take too much of the time.
    std::int64_t look_at_losses_at = 10'000;
    std::int64_t storages_made = 0;
    std::int32_t longest_chain = 1'000;  // of calls that hang on each other, before one is kept
    bool count_again = false;
    std::vector<const Facts*> again;  // what ran again, if somebody counts
    int never_recompute = 0;          // depth of `rekindle.never_recompute()`
    Samples samples;
    int running = 0;           // operators that run just now, for the first time or again
    std::uint64_t begun = 0;   // and all that ever began
    int reading_anything = 0;  // how many of those that run may read whatever the program holds
    int lending = 0;           // how many threads may let go of what variables hold now
    int replaying = 0;         // operators that run again just now
    Readers readers;
    std::map<std::int64_t, std::unique_ptr<Reading>>
        noted;               // what Python reads, or functions of one's own
    std::int64_t notes = 0;  // that ever were
    Snapshot peak_snapshot;
    bool peak_snapshot_due = false;     // memory is 2 % above what it was at the last one
    bool samples_due = false;           // somebody is to take what was noted of memory over time
    bool owners_due = false;            // somebody is to be told what is in `met`
    std::vector<const void*> met;       // storages of weights, for their owners
    bool tell_ranges = false;           // of the profiler, amid the step of an optimizer
    bool stepping = false;              // amid such a step: workspaces get what room there is
    std::int64_t look_back_at = 1'000;  // storages made until then
    bool let_go_of_everything = false;  // before every operator: for tests
    bool lends = false;                 // what variables hold, if nothing else is left
    int husks = 0;                      // how many storages of the program are empty now

    std::unique_ptr<Audit> audit;         // null: nobody compares what is computed again
    std::vector<LastResort*> resorts;     // each lends what variables hold
    std::unique_ptr<AnyTime> any_time;    // null: not what variables hold, or only as a last resort
    std::unique_ptr<StepObserver> steps;  // null: nobody follows the program's steps
    std::unique_ptr<Swapper> swapper;     // null: nothing is swapped
    Transcriber transcriber{engine.journal};         // while it writes, nothing is only counted
    std::map<std::int64_t, Transcript> transcripts;  // those that Python began
    bool recorded = false;      // all of the run: nothing is forgotten that a trace cannot say
    bool uses_arena = false;    // PyTorch's memory on the CPU comes from there
    bool notes_places = false;  // Python is told of every operator, to note where the program is
    bool places_due = false;    // of those that it has not been told of

    // Operators, recomputed ones and steps of optimizers as well, until one finds no room: for
    // tests. Room for a step is made at its beginning, but where what it wrote is put back.
    std::int64_t refuse_in = -1;

    void refuse_for_tests(const char* who) {
        if (refuse_in < 0 || (stepping && !tell_ranges)) {
            return;
        }
        --refuse_in;
        if (refuse_in < 0) {
            throw Shortage{1, engine.memory, engine.budget, who};
        }
    }

    int interrupt_in = -1;  // replays until one fails: for tests
    bool interrupt_before = false;

    // What Python calls it.
    std::ptrdiff_t number() const noexcept { return reinterpret_cast<std::ptrdiff_t>(this); }

    // Which one of the process it is, from 1: no other ever is.
    const std::uint64_t ordinal;

    // From now on values may go to the host, as `copies` of Python's makes them.
    void swap_with(const Swap& swap, struct _object* copies);
    // `record`, which was away, is in `home` from now on.
    void hang(Record& record, const Home& home);

    // -- storages -------------------------------------------------------------------------------

    // The context begins: what the device's allocator has given out already counts.
    void open();
    // Bytes of `home` as far as they are on the device that the budget is for.
    Bytes counted(const c10::StorageImpl& home);
    bool counts(const c10::StorageImpl& home);

    // The devices that were met so far.
    const std::vector<c10::Device>& devices_met() const noexcept { return devices_met_; }

    Recipe& new_call(const Facts* facts, Nanoseconds cost, bool replayable);
    // What `call` makes, or what it writes where something else was.
    Record& new_storage(Call& call, Bytes nbytes);
    // `call` ran, and took `workspace` inside itself; the engine hears of it.
    void admit(Recipe& call, Bytes workspace = 0);
    // An operator ran that made nothing.
    void account(const Facts& facts, Nanoseconds cost, Bytes workspace);
    // An operator ran whose results are only counted.
    void count(Nanoseconds cost, Bytes nbytes, Bytes workspace);
    // `tensor` is how the program has what `record` is.
    static void remember(Record& record, const c10::TensorImpl& tensor);
    Resident* resident_at(const c10::StorageImpl& home) noexcept;
    // The record of `tensor`; one never seen, or only counted, becomes a source. Null: no memory.
    Record* known(const c10::TensorImpl& tensor);

    // What is only counted.
    template <class F>
    void each_counted(F&& visit) {
        table_.each([&](const void* address, const Resident& resident) {
            if (resident.record == nullptr) {
                visit(address, resident.nbytes);
            }
        });
    }

    // Memory whose bytes are all that counts. Returns them, or 0 if they count already.
    Bytes count(c10::StorageImpl& home, const Facts* maker);
    // `record` lives in `home` from now on.
    void settle_in(Record& record, const Home& home);
    // The memory of `record` is nobody's but the caller's from now on.
    Home take_home(Record& record);
    // The memory of `before` now holds `after`.
    void succeed(Record& before, Record& after);
    // Whoever refers to `before` means `after` from now on.
    void hand_over(Record& before, Record& after);
    // `call` writes where `before` is; returns what will be there. Handles follow.
    Record& write_over(Call& call, Record& before);
    // What is where `before` is, which has a recipe, is about to change, and nobody will know how.
    // Returns what will be there.
    Record& changed_unseen(Record& before);
    void retain(Record& record, const Home& home);
    // The program gets `record` in its hands, brought back if need be.
    void use(Record& record);
    void pin(Record& record);
    void seal(Record& record);
    // `record` is about to be written: what only it can bring back is saved first (R4).
    void forget(Record& record);
    // The program may have changed the size, or the place, of what it holds.
    void resized(Record& record);
    void keep(const c10::TensorImpl& tensor);
    // Its memory counts from now on.
    void meet(const c10::TensorImpl& tensor);
    // It is saved, or written: if it is a view that `tensor.data = ...` gave memory of its own, the
    // version counter of its base, which is still its own as well, does not tell of the base alone.
    void note_if_it_strays(const c10::TensorImpl& tensor);

    // An optimizer will write it, step after step: it is a constant (R4), or each could be computed
    // again from all steps before.
    void keep_from_now_on(const c10::TensorImpl& tensor);
    // What can only be computed from it as it is now is brought back, and stays (R4).
    void save_what_needs(const c10::TensorImpl& tensor);
    // What is in `home` is about to be cut off, or to grow. Returns whether it is known.
    bool about_to_resize(c10::StorageImpl& home, Bytes nbytes);
    // It has been.
    void has_been_resized();
    // From now on others may write to `home`: what recipes made of what is there is safe (R4).
    void give_away(c10::StorageImpl& home);
    // A copy made before of foreign memory, if it still is one; else null.
    Record* copy_still(Record& record);
    // Makes one. `home`: keeps it, until a recipe does.
    Record& copy_now(Record& record, Home& home);
    // From now on recipes read this weight: what it is now it has to be when they run again.
    static void note_checksum(Record& record);
    // Nothing follows `tensor` from now on, until `follow_again`.
    void step_back(const c10::TensorImpl& tensor);
    void follow_again();
    // Finds out about memory whose end nobody tells of; not about `youngest` alone.
    void look_at_unheard(bool youngest = false);
    // What the program carries along from graph to graph is kept, not how it came about.
    void forget_history();
    // What is kept for nothing but to compute again what is there goes; whether anything did.
    bool forget_sources();
    // Whether nobody waits for what else the operators made that made `record`.
    bool may_forget(Record& record);
    // What variables hold, and nobody reads: it may be let go until the engine hears otherwise.
    std::vector<Ref<Storage>> lend();
    static bool can_be_lent(const Record& record, const Homes& read, bool but_saved);
    bool note_all_read(Homes& read) const;
    // `reader` reads from now on, until `ends`: what it reads, and was lent, stays.
    void begins(Reader& reader);

    void ends(Reader& reader) noexcept { readers.remove(reader); }

    // An operator begins that may read whatever the program holds: what was lent stays.
    void stops_lending();

    // One more of something, as long as it lives.
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

    // If `home` is a husk, what was there is there again.
    void bring_back(const c10::StorageImpl& home);
    // It is there, and stays as long as the program has it: its address leaves PyTorch.
    void keep_there(c10::StorageImpl& home);
    // `record`, which is there, stays as long as the program has it.
    void stays(Record& record);
    // The program has no husks from now on.
    void bring_all_back();
    void own(Record& record);
    // One reason less to keep the memory of `record`: if there is none, it is let go.
    void disown(Record& record);

    // -- memory ---------------------------------------------------------------------------------

    // What all that takes more than next to nothing leaves free on a device. There an error is
    // likely to leave others amid something, as where `capture_begin` sets a generator's state.
    Bytes kept_back(Bytes needed) const noexcept {
        constexpr Bytes small = Bytes{4} << 10;
        constexpr Bytes most = Bytes{64} << 10;
        const bool keeps = device.queues() && device.keeps_back && needed > small;
        return keeps ? std::min(most, engine.budget >> 10) : 0;
    }

    // What happens in `events` is lost time: plain PyTorch does nothing of it.
    template <class F>
    void lose(F&& events);
    // Lets go until `needed` bytes fit, or throws `Shortage`.
    void make_room(Bytes needed, const char* who);
    // Lets go until `wanted` bytes fit, or until nothing is left to let go.
    void clear(Bytes wanted);
    // Until no memory is on its way to the host.
    void wait_for_copies() const;
    // Lets go of all that may be.
    void let_go_now();
    // Finds out which values the program has let go of. Not amid an action.
    void poll();
    // The device ran out of memory all the same, and raised `out`: evicts neighbors in memory, then
    // as much as `needed` bytes, then four times that, then all, and tries again each time. From
    // then on the budget is what fitted, or it would come again at the next operator.
    template <class F>
    void rescue(Bytes needed, const std::exception& out, F&& attempt);
    // Evicts the cheapest neighbors in memory so that `nbytes` are free in one piece on the device.
    // Returns whether there were such.
    bool evict_neighbors(Bytes nbytes);
    // Evicts what is in the cheapest place for `nbytes`: neighbors, or all of some segments of
    // `missing` bytes, which the caller gives back to the device.
    Way evict_for_place(Bytes nbytes, Bytes missing, Segments segments);

    // All memory there whose end nobody tells of, by its address and bytes.
    template <class F>
    void each_on_device(F&& visit) const {
        for (const Unheard& each : unheard_) {
            const Home home = each.home.lock();
            if (home && home->device() == device.which() && home->data() != nullptr) {
                const auto address = reinterpret_cast<std::uintptr_t>(home->data());
                visit(
                    static_cast<Bytes>(address), device.rounded(static_cast<Bytes>(home->nbytes()))
                );
            }
        }
    }

    // Takes what is dead out of the table; it is acted on later. Before anything is looked up
    // there.
    void collect();
    // Acts on what happened meanwhile: handles that died, memory that is gone.
    void settle();

    void settle_if_needed() {
        const bool collected = !dead_handles_.empty() || !gone_.empty() || uncounted_ != 0;
        const bool more =
            !back_.empty() || unheard_.size() > look_at_unheard_at_ || has_discarded();
        if (deaths.any() || collected || more) {
            settle();
        }
    }

    // Whether memory is gone, of which `collect` heard and the engine has not.
    bool any_gone() const noexcept { return !gone_.empty(); }

    // Likewise, and something that is locked was there.
    bool any_locked_is_gone() const noexcept {
        return std::ranges::any_of(gone_, [](const Ref<Storage>& each) {
            return each->locks != 0;
        });
    }

    // An operator of the program is about to run.
    // Returns which stream `now` is.
    StreamIndex about_to_run(const std::optional<c10::Stream>& now) {
        const StreamIndex here = device.see(now);
        settle_if_needed();
        if (transcriber.writes()) {
            poll();  // a trace says when the program lets go, not when somebody asks
        }
        return here;
    }

    // Memory is about to be more than ever: what died by now does not count.
    void about_to_peak(Bytes needed) {
        if (device.queues() && needed > engine.peak - engine.memory) {
            look_at_unheard(true);
            settle_if_needed();
        }
    }

    // The context is over: from now on what dies is acted on at once.
    void close();
    // From now on what happens is written for `transcript`, and what there is now is in it.
    void begin(Transcript& transcript);
    // Notes in `snapshot` who holds memory now. Walks everything: not for every operator.
    void take_snapshot(Snapshot& snapshot, ProgramLine line);
    // Takes `peak_snapshot` anew if more memory is in use than at the last one.
    void take_peak_snapshot(ProgramLine line);
    // Take a snapshot now, and one of each new peak of `nbytes` or more.
    void expect_peak(Bytes nbytes, ProgramLine line);
    // The tensors that the program still has of what is in memory and in the graph, the oldest
    // first.
    std::vector<at::Tensor> program_tensors();
    // Of values that are evicted and that the program or autograd still has.
    Bytes evicted_bytes() const;
    // `tensor` is what `kind` says; if it has memory, `snapshot` says so too.
    void add_owned(
        Snapshot& snapshot, const c10::TensorImpl& tensor, Owned::Kind kind, const void* parameter
    );
    // A module was given `tensor`, as a parameter or as a buffer.
    void add_module_tensor(const c10::TensorImpl& tensor, bool parameter);

    // How many the engine knows of so far.
    OpId operators() const noexcept { return next_op_; }

    std::size_t bytes_of_bookkeeping() const noexcept;

    std::size_t alive() const noexcept { return records_.alive() + recipes_.alive(); }

    // -- actions --------------------------------------------------------------------------------

    // Tells the engine of `events`, and keeps what it says nothing can bring back any more.
    template <class F>
    void perform(F&& events, const char* who = "");
    // Likewise, where something may have to be computed again. If what that reads died and nobody
    // told, it begins anew.
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
    // Those that were made or met last: most of what dies is among them.
    static constexpr std::size_t YOUNGEST = 64;

    // Whether there are copies on the host that nobody needs.
    bool has_discarded() const noexcept {
        return engine.host != nullptr && !engine.host->discarded.empty();
    }

    // Runs `events`, amid which the engine takes every transfer for done.
    void act(c10::function_ref<void()> events) const;
    void let_go_for(Bytes needed, const char* who);
    void make_room_and_wait(Bytes needed, const char* who);
    void wait_for_room(Call& call, bool in_place);
    void refuse_in_a_graph(const char* site) const;
    void find_places(const Recipe& recipe, bool in_place);
    std::unordered_map<Bytes, Storage*> price(Segments& segments);
    void compute_now(Call& call, bool in_place);
    StreamIndex order_recomputation(const Recipe& recipe, bool in_place);
    void settle_results(Recipe& recipe, const c10::SmallVector<Home, 2>& homes, const Order& order);
    bool may_drop(const Record& record) const;
    Order run(Recipe& recipe, bool in_place, c10::SmallVector<Home, 2>& homes);
    void poll_held();
    bool ask_allocator();
    void look_at_all();
    void forget_address(const void* address, Resident resident);
    void let_home_go(Record& record);
    void note_uncounted(const void* address, Bytes nbytes) noexcept;
    Record& known_at(Resident found, c10::StorageImpl& home);
    Record* emptied_at(const c10::StorageImpl& home);
    Record& adopt(const c10::TensorImpl& tensor, c10::StorageImpl& home);
    Record& list(Resident counted, const Home& home, const c10::TensorImpl* tensor);
    Record& become_source(const Facts* maker, const Home& home, const c10::TensorImpl* tensor);
    static void describe(Record& record, const c10::TensorImpl& tensor);
    void vacate(Record& record);
    void release(Record& record);
    void let_go_of_idle();
    void maybe_held(Record& record);
    void not_held(Record& record) noexcept;
    bool carried_along(Record& record);
    void gone(Record& record);
    bool leave_a_husk(Record& record);
    Home take_husk(Record& record);
    void arrive(Record& record, const Home& home, const Home& husk);
    void hand_back(Record& record);
    std::exception_ptr fill_all_husks();
    void use_in_any_case(Record& record);
    void note_memory();
    void settle_at(
        const void* address,
        Record* record,
        Bytes nbytes,
        const Facts* maker,
        const c10::StorageImpl* home
    );
    AllocationId allocation_of(const c10::TensorImpl& tensor);
    void add_gradient(Snapshot& snapshot, const at::Tensor& leaf);
    void add_tensors_of_modules(Snapshot& snapshot);
    void add_storage(Snapshot& snapshot, Record& record);

    unsigned ticks_ = 0;
};

template <class F>
void Driver::rescue(Bytes needed, const std::exception& out, F&& attempt) {
    const Bytes at_first = engine.memory;
    const bool known = reserved.limited();
    reserved.turned_out(device.most_reserved());
    std::string said = said_by(out);
    bool lowers = known || !device.finds_places;
    const auto fits = [&] {
        wait_for_copies();
        const Bytes now = engine.memory + engine.in_flight + needed;
        try {
            attempt();
            shortfall.fitted(
                lowers ? std::max(now, at_first / 2 + needed) : UNLIMITED, engine.budget
            );
            return true;
        } catch (const std::exception& error) {
            if (!is_full(error)) {
                throw;
            }
            said = said_by(error);
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
    const Bytes step = shortfall.step(needed, before);
    for (const Bytes most : {before - step, before - 4 * step, Bytes{-1}}) {
        ask_allocator();
        poll_held();
        perform([&] { engine.shrink(most); });
        device.empty_cache();
        if (fits()) {
            return;
        }
    }
    throw Full(said);
}

template <class F>
void Driver::perform(F&& events, const char* who) {
    try {
        act(events);
    } catch (const NoRoom& shortage) {
        const bool nobody = *who == '\0' && shortage.call;
        throw Shortage(
            shortage.needed,
            shortage.memory,
            shortage.budget,
            nobody ? recipe_of(*shortage.call).name() : who
        );
    }
    engine.take_bereft(bereft_);
    for (Storage* bereft : bereft_) {  // kept like a source from now on
        own(record_of(*bereft));
    }
    bereft_.clear();
}

template <class F>
void Driver::lose(F&& events) {
    using Clock = std::chrono::steady_clock;
    if (losing++ == 0) {
        losing_since = Clock::now();
    }
    const auto over = [&] {  // another thread may have begun while something was recomputed
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

// The program may drop one thing after the other while this goes on, each of them once.
template <class F>
void Driver::bring_once_more(F&& events) {
    for (std::size_t left = engine.n_storages();; --left) {
        look_at_all();
        try {
            perform(events);
            return;
        } catch (const Died&) {
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
    } catch (const Died&) {
        bring_once_more(events);
    } catch (const Shortage&) {
        if (!shortfall.as_given(engine.budget)) {
            throw;
        }
        const Shortfall::Insisting insisting(shortfall);
        perform(events);
    }
}

// Within whose budget this process is; null: in none. Any thread may ask, without the lock. One
// that joined an earlier budget, and goes on, is in none.
c10::intrusive_ptr<Driver> active();
// Whose is an operator with these keys, and the lock, to be adopted; null: nobody's, and no lock.
c10::intrusive_ptr<Driver> lock_and_see(c10::DispatchKeySet keys);
// This thread of Python's is within the budget of `driver`; null: in none.
void join(const Driver* driver) noexcept;
void set_active(c10::intrusive_ptr<Driver> driver);
// Whether no other thread may free a gradient now: none that started inside ran a backward pass.
bool gradients_stay();
// Whether the thread that entered looks at a new peak later: this one must not ask for gradients.
bool looks_later();

}  // namespace rekindle
