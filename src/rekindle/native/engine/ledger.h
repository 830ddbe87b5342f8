// Accounts for memory, evicts, and frees storages that left the graph. Twin of
// rekindle.engine._ledger and ._exchange.
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
#include "rules.h"

namespace rekindle {

class AdvisedChooser;

// A violated invariant.
struct Fault final {
    const char* what;
    StorageId storage;  // Negative if it is not about one storage.
};

// Accounts for memory and evicts, or swaps values out to the host. `Engine` is the other half,
// which restores values.
//
// The caller keeps other threads away. Events do not nest, but performing an action may ask for
// room again (`shrink`).
class Ledger {
public:
    Ledger(const Ledger&) = delete;
    Ledger& operator=(const Ledger&) = delete;
    Ledger(Ledger&&) = delete;
    Ledger& operator=(Ledger&&) = delete;

    const Rules rules;
    Bytes budget;
    Bytes memory = 0;
    Bytes unlisted = 0;   // Part of `memory` that is in no storage of the graph.
    Bytes in_flight = 0;  // Bytes outside `memory` that calls in progress take, in all threads.
    Bytes peak = 0;
    Nanoseconds clock = 0;
    Nanoseconds compute_ns = 0;    // Time of first executions.
    Nanoseconds recompute_ns = 0;  // Time of all other executions.
    Graph graph;
    std::unique_ptr<HostMemory> host;  // Null if swapping is off.
    // User-held storages that no other storage in the graph depends on.
    std::vector<Ref<Storage>> idle;
    Journal journal;

    // Return the first storage that is resident or may be recomputed. `Storage::next` leads to the
    // others.
    Storage* first_storage() const noexcept { return first_; }

    std::size_t n_storages() const noexcept { return n_storages_; }

    // Return the first violated invariant. Call it between events.
    std::optional<Fault> check();

    // -- for drivers ----------------------------------------------------------------------------

    // Return how often other events ran within an event, and may have changed the graph.
    std::uint64_t visits() const noexcept { return visits_; }

    // Return the bytes that `call` needs in addition to its outputs while it runs.
    Bytes workspace_of(const Call& call) const noexcept {
        return call.has_workspace ? performer_.workspace(call) : 0;
    }

    // Return true if `nbytes` more would fit after evicting all candidates. Evicts nothing.
    bool has_room(Bytes nbytes) const noexcept;
    // Evict until `nbytes` more fit. Throw `NoRoom` if no candidate is left.
    void make_room(Bytes nbytes, Call* call = nullptr);
    // Evict until at most `nbytes` are in use, or no candidate is left.
    void shrink(Bytes nbytes);
    // Evict these storages, for a driver that needs free memory at certain addresses. Skips those
    // that are no candidates or were evicted together with an earlier one.
    void evict_these(std::span<const Ref<Storage>> storages);
    // Return the policy's loss from evicting the candidate `storage` now, regardless of its size.
    double loss(Storage& storage);
    // Activate the policy now, before the first eviction needs it.
    void listen();
    // Move the storages that lost their recipe since the last call, and that others depend on, to
    // `found`.
    void take_unrecomputable(std::vector<Storage*>& found);
    // Set whether `storage` may be evicted while the program holds it.
    void let_return(Storage& storage, bool returns);
    // Let `storage` be evicted while the program holds it, but only if nothing else can be evicted.
    void let_return_last(Storage& storage);
    // Undo all calls of `let_return_last`.
    void clear_reserve() noexcept;
    // Keep the resident `storage`, which the program reads, until `unlock`.
    void lock(Storage& storage);
    // Undo `lock`. Frees `storage` if it died meanwhile.
    void unlock(Storage& storage);

    // -- copies on the host ---------------------------------------------------------------------

    // Enable swapping. Call it before the first event that could swap.
    void swap_with(const Swap& swap);
    // Set the measured bandwidths; 0 leaves one unchanged.
    void measured(std::int64_t out_bytes_per_s, std::int64_t in_bytes_per_s);
    // Copy the likely next victims to the host while the outgoing link is idle, so that their
    // eviction need not wait for the copy. Called after an operator. Does nothing while less than
    // half of the budget is in use, when perhaps no eviction will ever be needed.
    void ahead();
    // Discard copies that are not needed any more. Otherwise this happens when a new copy needs the
    // room.
    void discards();
    // The performer had started a `swap_out` of `storage` that failed later (for example because
    // the disk is full). The current usage of the host becomes its limit. Return true if the memory
    // must stay, because the value cannot be recomputed or was not to be evicted yet.
    bool swap_out_failed(Storage& storage);

    // -- advice, if the engine is advised -------------------------------------------------------

    // Mark `storage`: the plan does not need its value until the plan recomputes it.
    void mark(Storage& storage);
    // Remove the mark: the plan needs the value from now on.
    void unmark(Storage& storage);
    // Remove all marks: the policy decides alone.
    void clear_marks();
    // Return the bytes of marked candidates, without those that `inputs` read.
    Bytes spare_beside(std::span<const Edge> inputs);

protected:
    // Scope of an event. When the outermost one ends, unreferenced objects are destroyed.
    class Event final {
    public:
        explicit Event(Ledger& ledger) noexcept : ledger_(ledger) {
            ++ledger_.depth_;
            ++ledger_.nesting_;
        }

        Event(const Event&) = delete;
        Event& operator=(const Event&) = delete;
        Event(Event&&) = delete;
        Event& operator=(Event&&) = delete;

        ~Event() {
            --ledger_.nesting_;
            if (--ledger_.depth_ == 0) {
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
        const Rules& how,
        Performer& performer,
        std::unique_ptr<Chooser> own
    );
    ~Ledger();

    // -- eviction -------------------------------------------------------------------------------

    void evict(Storage& storage);
    void swap_out(Storage& storage);
    void free(Storage& storage);
    // Free the storages in `freed_`.
    void free_all();
    void vanish(Storage& storage);
    // Evict the dead `storage` if it may still be needed, otherwise remove it from the graph.
    void let_go(Storage& storage);
    // Remove `start` from the graph if it will never be needed, together with what it alone needed.
    // Adds the resident ones to `freed_`.
    void prune(Storage& start);
    // Mark `start`, and all calls that depend on it, as not replayable.
    void lose_recipe(Call& start);
    void touch(Storage& storage);
    void enter_graph(Storage& storage);

    // -- candidates -----------------------------------------------------------------------------

    void lock_quietly(Storage& storage);
    void unlock_quietly(Storage& storage);
    void hold_by_program(Storage& storage);
    bool is_candidate(const Storage& storage) const noexcept;
    // Update whether `storage` is a candidate.
    void classify(Storage& storage);
    void renew(Storage& storage);
    void reprice(Storage& storage);
    static void appear(Storage& storage);
    void arrived(bool all_of_them);

    void note(
        Entry::Kind kind, std::int64_t id, std::int64_t number = 0, std::int64_t flags = 0
    ) noexcept {
        if (journal.is_open()) {
            journal.write({kind, id, number, flags, clock, memory});
        }
    }

    // Note an event, unless it is part of another one.
    void note_event(
        Entry::Kind kind, std::int64_t id, std::int64_t number = 0, std::int64_t flags = 0
    ) noexcept {
        if (nesting_ == 0) {
            note(kind, id, number, flags);
        }
    }

    // Return the bytes that may be in use when `nbytes` more are needed.
    Bytes budget_beside(Bytes nbytes) const noexcept {
        return budget == UNLIMITED ? UNLIMITED : budget - nbytes - in_flight;
    }

    void raise_peak(Bytes workspace = 0) noexcept { peak = std::max(peak, memory + workspace); }

    Performer& performer_;
    Chooser* chooser_;
    // Storages that lost their recipe while they were resident or on the host.
    std::vector<Ref<Storage>> unrecomputable_;
    std::vector<Storage*> freed_;
    int depth_ = 0;             // Events in progress in all threads.
    int nesting_ = 0;           // Events in progress that the next event is part of.
    std::uint64_t visits_ = 0;  // Interludes with visitors.

private:
    Storage* choose();
    void send_until(Bytes nbytes);
    void send(Storage& victim);
    bool pays(Storage& victim);
    void make_host_room(Bytes nbytes);
    void copy(Storage& storage, bool keep);
    void refuse(Storage& storage);
    Storage* worthiest() const noexcept;
    void land(bool all_of_them);
    void discard_all();
    void discard(Storage& storage);
    bool abandon_copy(Storage& storage);
    void left(Storage& storage) const;

    // Return true if `storage`, which has no recipe, can be swapped.
    bool swappable(const Storage& storage) const noexcept {
        return host != nullptr && (storage.on_host || !host->refuses(storage));
    }

    void give_up_reserve();
    void banish(Storage& start);
    bool needed_by_evicted(Storage& storage) const noexcept;
    // Remove `storage` from the graph and add storages that may now be unneeded to `unneeded`.
    void leave_graph(Storage& storage, std::vector<Storage*>& unneeded);
    // Mark `call` as not replayable. Return the storages of its outputs that are in the graph.
    std::vector<Storage*> disown(Call& call);
    void unlist(Storage& storage) noexcept;
    void dispose() noexcept;
    const char* fault_of(Storage& storage) const;
    std::optional<Fault> fault_of_host() const;

    std::unique_ptr<Chooser> policy_;
    std::unique_ptr<Chooser> asleep_;  // Stand-in until the first choice.
    AdvisedChooser* advice_ = nullptr;
    // Storages that may be evicted while held if nothing else can be.
    std::vector<Storage*> reserve_;
    std::vector<Storage*> unneeded_;  // Stack of `prune`, empty between calls.
    std::int64_t order_ = 0;
    Storage* first_ = nullptr;
    Storage* last_ = nullptr;
    std::size_t n_storages_ = 0;
};

}  // namespace rekindle
