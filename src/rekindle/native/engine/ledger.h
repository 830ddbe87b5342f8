// The engine's accounts: counts memory against the budget, evicts storages, and frees those that
// left the graph. Twin of rekindle.engine._ledger and ._exchange.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "../base/types.h"
#include "chooser.h"
#include "frame.h"
#include "graph.h"
#include "host_memory.h"
#include "journal.h"
#include "performer.h"

namespace rekindle {

class AdvisedChooser;

// A violated invariant of the engine, found by `Ledger::check`.
struct Fault final {
    const char* what;
    // storage whose state is wrong; negative if the fault is not about one storage
    StorageId storage;
};

// Counts memory against the budget, and evicts values or swaps them out to the host. The derived
// class `Engine` restores values.
//
// The caller guards the object by a lock. Events do not nest, except that performing an action may
// ask for room again (`shrink`).
class Ledger {
public:
    Ledger(const Ledger&) = delete;
    Ledger& operator=(const Ledger&) = delete;

    Bytes budget;
    Bytes memory = 0;
    Bytes unlisted = 0;  // Part of `memory` that belongs to no storage of the graph.
    // Bytes that running calls of all threads use and that are not part of `memory`.
    Bytes in_flight = 0;
    Bytes peak = 0;
    Nanoseconds clock = 0;
    Nanoseconds compute_ns = 0;    // Total cost of all first executions of calls.
    Nanoseconds recompute_ns = 0;  // Total cost of recomputations.
    Graph graph;
    std::unique_ptr<HostMemory> host;  // copies of values on the host; null: swapping is off
    // User-held storages from which no storage in the graph is computed. The driver releases its
    // own references to them (`Frees::let_go_of_idle`).
    std::vector<Ref<Storage>> idle;
    Journal journal;

    // Return the first storage of the engine's graph. `Storage::next` leads to the others.
    Storage* first_storage() const noexcept { return first_; }

    std::size_t n_storages() const noexcept { return n_storages_; }

    // Return the first violated invariant of the engine, if there is one. Must be called between
    // events.
    std::optional<Fault> check();

    // -- for drivers ----------------------------------------------------------------------------

    // Return how often events of other threads, or of the program's own code, ran in the middle of
    // an event. They may have changed the graph.
    std::uint64_t visits() const noexcept { return visits_; }

    // Return the bytes that `call` needs in addition to its outputs while it runs.
    Bytes workspace_of(const Call& call) const noexcept {
        if (call.has_workspace) [[unlikely]] {
            return performer_.workspace(call);
        }
        return 0;
    }

    // Return true if `nbytes` more would fit into the budget after evicting all candidates. Evicts
    // nothing.
    bool has_room(Bytes nbytes) const noexcept;
    // Evict storages until `nbytes` more fit into the budget. Throw `NoRoom` if no candidate for
    // eviction is left.
    void make_room(Bytes nbytes, Call* call = nullptr);
    // Evict storages until at most `nbytes` are in use, or no candidate for eviction is left.
    void shrink(Bytes nbytes);
    // Evict `storages`, for a driver that needs free memory at certain addresses. Storages that are
    // not candidates (any more) are skipped.
    void evict_these(std::span<const Ref<Storage>> storages);
    // Return the policy's loss if the candidate `storage` is evicted now: its score without the
    // factor for its size.
    double loss(Storage& storage);
    // Build the policy's state now, instead of at the first eviction, so that the policy sees all
    // later events.
    void listen();
    // Add to `found` the storages in memory that lost their recipe since the last call, if other
    // values are computed from them.
    void take_unrecomputable(std::vector<Storage*>& found);

    // Return true if a storage lost its recipe since the last `take_unrecomputable`.
    bool has_unrecomputable() const noexcept { return !unrecomputable_.empty(); }

    // Set whether `storage` may be evicted while the program holds it.
    void set_evictable_while_held(Storage& storage, bool evictable);
    // Allow eviction of `storage` while the program holds it, but only if nothing else can be
    // evicted.
    void set_evictable_last(Storage& storage);
    // Empty the list of storages that may be evicted as a last resort (`set_evictable_last`).
    void clear_reserve() noexcept;
    // Keep `storage`, which is resident and which the program reads, in memory until `unlock`.
    void lock(Storage& storage);
    // Undo `lock`. Free `storage` if the last reference to it disappeared meanwhile.
    void unlock(Storage& storage);

    // -- copies on the host ---------------------------------------------------------------------

    // Enable swapping to the host. Call this before the first event that could swap.
    void swap_with(const Swap& swap);
    // Set the measured bandwidths of swap-out and swap-in; 0 leaves a bandwidth unchanged.
    void measured(std::int64_t out_bytes_per_s, std::int64_t in_bytes_per_s);
    // Copy the storages that will probably be evicted next to the host while the outgoing direction
    // is idle. Their eviction then need not wait for the copy. Called after an operator. Does
    // nothing while at most half of the budget is in use, because perhaps no eviction will be
    // needed.
    void ahead();
    // Let a plan decide from now on which values to copy to the host (`follow`), or the engine
    // itself. With `Swap::only` the engine always decides.
    void follow_plan(bool follow);

    // Return true while a plan decides which values to copy to the host.
    bool is_planned() const noexcept { return planned_; }

    // Begin to copy `storage` to the host, because a plan says so. The storage stays resident and,
    // unlike after `ahead`, it may be evicted at once. Does nothing if `storage` is not resident or
    // is copied already, or if the host has no room.
    void save(Storage& storage);
    // Discard host copies that are not needed any more, instead of waiting until a new copy needs
    // their room.
    void discards();
    // Report that a `swap_out` of `storage` failed after the performer had started it (for example
    // because the disk is full). The bytes that the host holds now become its limit. Return true if
    // `storage` must stay in memory, because it cannot be recomputed or was only copied ahead of
    // its eviction.
    bool swap_out_failed(Storage& storage);
    // Event: the program is about to overwrite `storage`, which is resident. Discards its host
    // copy, which has the old contents.
    void written(Storage& storage);
    // Event: a step of the program has ended, so that the next one may be alike.
    void step();

    // -- storages that a plan marks as not needed for now ---------------------------------------
    // Only with a policy that is wrapped in an `AdvisedChooser`.

    // Mark `storage` as not needed until the plan recomputes it. Marked storages are evicted first.
    void mark(Storage& storage);
    // Remove the mark of `storage`, because the plan needs its value from now on.
    void unmark(Storage& storage);
    // Remove all marks of the plan. From now on the policy decides alone.
    void clear_marks();
    // Return the bytes of all candidates that the plan marked, except those that `inputs` read.
    Bytes spare_beside(std::span<const Edge> inputs);

    // Note that `workspace` bytes are in use beside `memory`.
    void raise_peak(Bytes workspace = 0) noexcept { peak = std::max(peak, memory + workspace); }

protected:
    // Scope in which the engine handles one event. When the outermost scope ends, storages and
    // calls to which nothing refers are destroyed.
    class Event final {
    public:
        explicit Event(Ledger& ledger) noexcept : ledger_(ledger) {
            ++ledger_.depth_;
            ++ledger_.nesting_;
        }

        Event(const Event&) = delete;
        Event& operator=(const Event&) = delete;

        ~Event() {
            --ledger_.nesting_;
            if (--ledger_.depth_ == 0 && ledger_.graph.any_dead()) {
                ledger_.dispose();
            }
        }

    private:
        Ledger& ledger_;
    };

    Ledger(
        Bytes most,
        const Policy& policy,
        bool advised,
        std::optional<Nanoseconds> recompute_limit,
        Performer& performer,
        std::unique_ptr<Chooser> own
    );
    ~Ledger();

    // -- eviction -------------------------------------------------------------------------------

    void evict(Storage& storage);
    void swap_out(Storage& storage);
    void free(Storage& storage);
    // Free the memory of the storages in `freed_`.
    void free_all();
    void vanish(Storage& storage);
    // Evict `storage` if it is dead and only recomputations may need it; else remove it, if nothing
    // needs it. If it `may_stay`, a dead storage stays in memory while an evicted value that the
    // program can reach is recomputed from it.
    void evict_or_remove(Storage& storage, bool may_stay = true);
    // Remove `start` from the graph if no event can need it any more, and then the storages that
    // only its recomputation needed. Adds the resident ones to `freed_`.
    void prune(Storage& start);
    // Mark `start`, and all calls whose recomputation depends on it, as not replayable.
    void lose_recipe(Call& start);
    // Make those of `storages` that are resident checkpoints, so that they are evicted last.
    void keep_checkpoint(std::span<Storage* const> storages);
    // Make the checkpoints ordinary candidates for eviction.
    void give_up_checkpoints();
    // Return the bytes of the budget that are free or occupied by candidates for eviction.
    Bytes free_bytes() const noexcept;
    void touch(Storage& storage);
    // Return the source among the candidates that the program uses last, after more than `than`
    // calls; null if there is none.
    Storage* furthest(std::int64_t than) const noexcept;
    void enter_graph(Storage& storage);

    // -- candidates -----------------------------------------------------------------------------

    void lock_quietly(Storage& storage);
    void unlock_quietly(Storage& storage);
    void hold_by_program(Storage& storage);
    bool is_candidate(const Storage& storage) const noexcept;
    // Add `storage` to the candidates for eviction, or remove it, according to `is_candidate`.
    void classify(Storage& storage);
    void renew(Storage& storage);
    void reprice(Storage& storage);
    static void appear(Storage& storage);
    void unlock_prefetched(bool all_of_them);
    void send(Storage& victim);

    // Note that the program makes or uses the source `storage` now.
    void note_use(Storage& storage) const {
        if (host != nullptr) [[unlikely]] {
            host->order.used(storage);
        }
    }

    // Count a call of the program.
    void count_call() const noexcept {
        if (host != nullptr) [[unlikely]] {
            ++host->order.place;
        }
    }

    void note(
        Entry::Kind kind, std::int64_t id, std::int64_t number = 0, std::int64_t flags = 0
    ) noexcept {
        if (journal.is_open()) [[unlikely]] {
            journal.write({kind, id, number, flags, clock, memory});
        }
    }

    // Write an event into the journal, unless it is part of another event.
    void note_event(
        Entry::Kind kind, std::int64_t id, std::int64_t number = 0, std::int64_t flags = 0
    ) noexcept {
        if (nesting_ == 0) {
            note(kind, id, number, flags);
        }
    }

    // Return how many bytes may be in use now so that `nbytes` more fit into the budget.
    Bytes budget_beside(Bytes nbytes) const noexcept {
        return budget == UNLIMITED ? UNLIMITED : budget - nbytes - in_flight;
    }

    Performer& performer_;
    // The most time of recomputation, after which `Thrashed` is thrown.
    const std::optional<Nanoseconds> recompute_limit_;
    Chooser* chooser_;
    // Storages that lost their recipe while they were resident or on the host.
    std::vector<Ref<Storage>> unrecomputable_;
    std::vector<Storage*> freed_;
    int depth_ = 0;  // Number of open `Event` scopes, also of interrupted events.
    // Number of `Event` scopes opened since the innermost `Interlude` began. If it is 0, an event
    // that begins now is not part of another event, and gets its own entry in the journal.
    int nesting_ = 0;
    // A plan decides which values to copy to the host. The engine itself then copies only values
    // without a recipe.
    bool planned_ = false;
    // Resident storages at which later recomputations start.
    std::vector<Storage*> checkpoints_;
    // True once a storage was evicted to which the program or autograd still referred.
    bool evicted_wanted_ = false;
    // True while a recomputation is attempted without evicting checkpoints.
    bool spares_checkpoints_ = false;
    std::uint64_t visits_ = 0;  // Number of `Interlude` scopes in which other events ran.

private:
    Storage* choose();
    void send_until(Bytes nbytes);
    void make_host_room(Bytes nbytes);
    void copy(Storage& storage, bool keep);
    void refuse(Storage& storage);
    Storage* most_worth_copying() const noexcept;
    void unlock_saved(bool all_of_them);
    void discard_all();
    void discard(Storage& storage);
    bool abandon_copy(Storage& storage);
    void left(Storage& storage) const;

    // Return true if `storage`, which has no recipe, can be swapped out.
    bool swappable(const Storage& storage) const noexcept {
        return host != nullptr && (storage.on_host || !host->refuses(storage));
    }

    // Make the storages of `reserve_`, which are evicted only as a last resort, candidates for
    // eviction.
    void give_up_reserve();
    void give_up(std::vector<Storage*>& kept, bool Storage::* mark);
    // Remove `storage` from the graph. Add the storages that then may not be needed any more to
    // `unneeded`.
    void leave_graph(Storage& storage, std::vector<Storage*>& unneeded);
    // Mark `call` as not replayable, and remove it from the consumers of its inputs. Return the
    // storages of its outputs that are in the graph.
    std::vector<Storage*> disown(Call& call);
    void unlist(Storage& storage) noexcept;
    void dispose() noexcept;
    const char* fault_of(Storage& storage) const;
    std::optional<Fault> fault_of_host() const;

    std::unique_ptr<Chooser> policy_;
    // Stand-in for the policy until the first eviction; does nothing.
    std::unique_ptr<Chooser> null_chooser_;
    AdvisedChooser* advice_ = nullptr;
    // Storages that may be evicted while the program holds them, if nothing else can be evicted.
    std::vector<Storage*> reserve_;
    std::vector<Storage*> unneeded_;  // Stack of `prune`; empty between its calls.
    std::int64_t order_ = 0;
    Storage* first_ = nullptr;
    Storage* last_ = nullptr;
    std::size_t n_storages_ = 0;
};

}  // namespace rekindle
