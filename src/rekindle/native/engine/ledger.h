// What is in memory, what may be let go, and what leaves the graph for good. Twin of
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

// An invariant that does not hold.
struct Fault final {
    const char* what;
    StorageId storage;  // negative: none in particular
};

// Counts memory, and lets go of it or sends it to the host. `Engine` is the other half, which
// brings back.
//
// Whoever calls must keep other threads away. Nothing here runs twice at a time, but performing may
// ask for room again (`shrink`).
class Ledger {
public:
    Ledger(const Ledger&) = delete;
    Ledger& operator=(const Ledger&) = delete;
    Ledger(Ledger&&) = delete;
    Ledger& operator=(Ledger&&) = delete;

    const Rules rules;
    Bytes budget;
    Bytes memory = 0;
    Bytes unlisted = 0;   // of `memory`: what is counted, and in no storage of the graph
    Bytes in_flight = 0;  // beside `memory`: what calls in progress take, of whichever thread
    Bytes peak = 0;
    Nanoseconds clock = 0;
    Nanoseconds compute_ns = 0;    // first executions
    Nanoseconds recompute_ns = 0;  // all others
    Graph graph;
    std::unique_ptr<HostMemory> host;  // null: nothing is swapped
    std::vector<Ref<Storage>> idle;    // held, but nothing that was made from them remains
    Journal journal;

    // Every storage that is resident or may be recomputed, from here by `Storage::next`.
    Storage* first_storage() const noexcept { return first_; }

    std::size_t n_storages() const noexcept { return n_storages_; }

    // The first invariant that does not hold; between events, not during one.
    std::optional<Fault> check();

    // -- what drivers may ask for ---------------------------------------------------------------

    // How often others came amid an event, and may have changed what it goes by.
    std::uint64_t visits() const noexcept { return visits_; }

    // What `call` takes beside its outputs while it runs, and gives back.
    Bytes workspace_of(const Call& call) const noexcept {
        return call.has_workspace ? performer_.workspace(call) : 0;
    }

    // Whether `nbytes` more would fit if all that may be let go went; nothing does.
    bool has_room(Bytes nbytes) const noexcept;
    // Lets go until `nbytes` more fit. Throws `NoRoom` when nothing is left to let go.
    void make_room(Bytes nbytes, Call* call = nullptr);
    // Lets go until no more than `nbytes` are in use, or nothing is left to let go.
    void shrink(Bytes nbytes);
    // Evicts just these, for a driver to whom it matters where memory is free. What may not be
    // evicted, or went with one before it, is left alone.
    void evict_these(std::span<const Ref<Storage>> storages);
    // What evicting `storage`, a candidate, would cost now, whatever its size, in the policy's own
    // terms.
    double loss(Storage& storage);
    // From now on the policy hears what becomes a candidate, though nothing has to go yet.
    void listen();
    // What became a source since this was last asked, and others are made from: into `found`.
    void take_bereft(std::vector<Storage*>& found);
    // Whether `storage` may be let go while the program holds it.
    void let_return(Storage& storage, bool returns);
    // Likewise, but only if nothing else is left to let go.
    void let_return_last(Storage& storage);
    // Nothing is let go only last any more.
    void clear_reserve() noexcept;
    // The program reads `storage`, which is resident: it stays until `unlock`.
    void lock(Storage& storage);
    // The inverse of `lock`; what died meanwhile is let go.
    void unlock(Storage& storage);

    // -- copies on the host, where there is one -------------------------------------------------

    // From now on what has to go may go to the host; before anything is there.
    void swap_with(const Swap& swap);
    // What copies really take, as the driver measured it; 0: nothing new is known.
    void measured(std::int64_t out_bytes_per_s, std::int64_t in_bytes_per_s);
    // Copies what will have to go next to the host while the way there is idle. After an operator:
    // what is let go later then need not wait for its copy. While less than half of the budget is
    // in use nothing happens: nothing may ever have to go.
    void ahead();
    // Lets go of copies that nobody needs; before a copy needs the room it happens anyway.
    void discards();
    // The performer could not do a `swap_out` of `storage`, where it said that it would (a full
    // disk). Returns whether its memory must stay: it cannot be computed again, or was not to go
    // yet. As much as is on the host now is all that may be there from now on.
    bool swap_out_failed(Storage& storage);

    // -- advice, for an engine that is advised --------------------------------------------------

    // The plan does not need `storage` until it has it computed again.
    void mark(Storage& storage);
    // The plan needs `storage` from now on.
    void unmark(Storage& storage);
    // Nothing is marked any more: the policy decides alone.
    void clear_marks();
    // Bytes of what is marked and may be let go although none of what `inputs` read may.
    Bytes spare_beside(std::span<const Edge> inputs);

protected:
    // An event in progress. When the outermost ends, what nobody refers to any more is disposed of.
    class Event final {
    public:
        explicit Event(Ledger& ledger) noexcept : ledger_(ledger) {
            ++ledger_.depth_;
            ++ledger_.amid_;
        }

        Event(const Event&) = delete;
        Event& operator=(const Event&) = delete;
        Event(Event&&) = delete;
        Event& operator=(Event&&) = delete;

        ~Event() {
            --ledger_.amid_;
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

    // -- letting go -----------------------------------------------------------------------------

    void evict(Storage& storage);
    void swap_out(Storage& storage);
    void free(Storage& storage);
    // Frees what `prune` and its like put into `freed_`.
    void free_all();
    void vanish(Storage& storage);
    // `storage` is dead: evicted if it may still be needed, else out of the graph.
    void let_go(Storage& storage);
    // Takes `start` out of the graph if it will never be needed, and what it alone needed. Puts
    // those that were resident into `freed_`.
    void prune(Storage& start);
    // `start` can never run again, nor what can only be had through it.
    void lose_recipe(Call& start);
    void touch(Storage& storage);
    void enter_graph(Storage& storage);

    // -- candidates -----------------------------------------------------------------------------

    void lock_quietly(Storage& storage);
    void unlock_quietly(Storage& storage);
    void hold_by_program(Storage& storage);
    bool is_candidate(const Storage& storage) const noexcept;
    // Brings the policy's view of `storage` up to date.
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

    // Likewise, unless it is part of another event.
    void note_event(
        Entry::Kind kind, std::int64_t id, std::int64_t number = 0, std::int64_t flags = 0
    ) noexcept {
        if (amid_ == 0) {
            note(kind, id, number, flags);
        }
    }

    // What may be in use when `nbytes` more are to come.
    Bytes budget_beside(Bytes nbytes) const noexcept {
        return budget == UNLIMITED ? UNLIMITED : budget - nbytes - in_flight;
    }

    void raise_peak(Bytes workspace = 0) noexcept { peak = std::max(peak, memory + workspace); }

    Performer& performer_;
    Chooser* chooser_;
    std::vector<Ref<Storage>> bereft_;  // in memory or on the host, and their recipe is lost
    std::vector<Storage*> freed_;
    int depth_ = 0;             // of events in progress, of all threads
    int amid_ = 0;              // of those that the event that comes next is part of
    std::uint64_t visits_ = 0;  // interludes in which somebody came

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

    // Whether `storage`, which has no recipe, can be had again.
    bool swappable(const Storage& storage) const noexcept {
        return host != nullptr && (storage.on_host || !host->refuses(storage));
    }

    void give_up_reserve();
    void banish(Storage& start);
    bool needed_by_evicted(Storage& storage) const noexcept;
    // Puts what one thing less needs into `unneeded`.
    void leave_graph(Storage& storage, std::vector<Storage*>& unneeded);
    // This cannot run again. Returns the storages of its outputs, if in the graph.
    std::vector<Storage*> disown(Call& call);
    void unlist(Storage& storage) noexcept;
    void dispose() noexcept;
    const char* fault_of(Storage& storage) const;
    std::optional<Fault> fault_of_host() const;

    std::unique_ptr<Chooser> policy_;
    std::unique_ptr<Chooser> asleep_;  // hears nothing, until the first choice
    AdvisedChooser* advice_ = nullptr;
    std::vector<Storage*> reserve_;   // let go while held when nothing else is left
    std::vector<Storage*> unneeded_;  // the stack of `prune`, empty between prunes
    std::int64_t order_ = 0;
    Storage* first_ = nullptr;
    Storage* last_ = nullptr;
    std::size_t n_storages_ = 0;
};

}  // namespace rekindle
