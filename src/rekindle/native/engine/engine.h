// Dynamic Tensor Rematerialization (DTR): decides online which storages to evict and which to
// recompute. Twin of rekindle.engine._engine, action by action; differences from the paper are
// explained there.
//
// The program's events are calls of the methods below; the engine acts by calling a `Performer`.
// The engine does not use torch, reads no clock, and has no lock. Its time is the sum of the costs
// of the calls that ran. The session mutex guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "checkpoints.h"
#include "ledger.h"

namespace rekindle {

// The online engine: keeps `memory` within `budget` bytes. This class handles the program's events
// and recomputes values; its base class `Ledger` evicts. An event may throw the performer's errors,
// `NoRoom` or `Thrashed`. The invariants hold after an error as well.
class Engine final : public Ledger {
public:
    // Make an engine with a budget of `most` bytes.
    //
    // `advised`: a plan can mark storages that are evicted before the policy is asked, as a
    // `Follower` needs. `recompute_limit`: the most time of recomputation, after which `Thrashed`
    // is thrown. `own`: chooser that replaces `policy`. The performer, and the slabs in which it
    // keeps storages and calls, must outlive the engine. No `Ref` may outlive the engine.
    Engine(
        Bytes most,
        Performer& performer,
        const Policy& policy = THRIFTY,
        bool advised = false,
        std::optional<Nanoseconds> recompute_limit = std::nullopt,
        std::unique_ptr<Chooser> own = nullptr
    );
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;
    ~Engine() = default;

    // Scope inside `Performer::compute` in which the engine accepts other events (visits), from
    // other threads or from the running call. Meanwhile the memory of the running call counts as in
    // flight, and storages that it overwrites in place count as evicted. After a visit, the
    // interrupted event restores evicted inputs again.
    class Interlude final {
    public:
        Interlude(Engine& engine, Call& call, bool in_place);
        // Scope around a call of the user's own policy: no memory is in flight and no storage is
        // being overwritten.
        explicit Interlude(Engine& engine);
        Interlude(const Interlude&) = delete;
        Interlude& operator=(const Interlude&) = delete;
        ~Interlude();

        // Record that an event of another thread ran during this scope. The interrupted event then
        // looks up its state again.
        void visited() noexcept { ++engine_.visits_; }

        // Undo the start of `call`, which failed before it wrote anything and before any event of
        // another thread. The storages that it was to overwrite count as resident again.
        void give_back(const Call& call);

    private:
        Engine& engine_;
        Call* const call_;  // the running call; null in a scope without one
        std::vector<Frame> frames_;
        std::vector<Value*> pending_;
        std::vector<Storage*> locked_;
        const Bytes taken_;
        const int nesting_;
        const bool spares_checkpoints_;
        bool lent_;
    };

    // -- events ---------------------------------------------------------------------------------

    // Event: the program runs `call` for the first time. The engine first restores evicted inputs.
    // held: variables of the program hold the outputs.
    void call(Call& call, bool held);
    // Event: the program has run `call` for the first time. Room for its outputs was made before.
    // Adds the call and its outputs to the graph of calls and values (`graph`). held: variables of
    // the program hold the outputs.
    void admit(Call& call, bool held);
    // Event: the program has called an operator whose outputs have no room. The operator did not
    // run. Adds the call and its outputs, which variables of the program hold, to the graph as if
    // they were evicted: a use computes them.
    void defer(Call& call);
    // Event: a variable of the program holds the evicted `storage` again, without its contents.
    void hold(Storage& storage);
    // Event: the program reads `value`. Restores the value if it is evicted. The value counts as
    // user-held from now on.
    void use(Value& value);
    // Restore `value`, and pin it: it stays in memory while anything refers to it.
    void pin(Value& value);
    // Event: add a reference to `storage`, such as one of autograd. Such a reference permits
    // eviction.
    void retain(Storage& storage);
    // Event: remove a reference that `retain` added.
    void release(Storage& storage);
    // Event: no variable of the program holds `storage` any more.
    void drop(Storage& storage);
    // Event: the program freed the memory of `storage`, to which nothing else refers. Also frees
    // the storages that only served to recompute `storage`.
    void gone(Storage& storage);
    // Event: the program is about to overwrite `storage`, a value without a recipe. Recomputes and
    // pins the evicted values that depend on its contents (R4, sources).
    void forget(Storage& storage);
    // Event: an unknown write changed the contents of `storage`, which is in memory. Drops its
    // recipe, so it becomes a source (a value without a recipe).
    void seal(Storage& storage);
    // Event: the contents of `storage` are lost, because a call failed while it overwrote them. The
    // program has no reference to `storage`. May be called inside `Performer::compute`.
    void spoil(Storage& storage);
    // Event: an operator ran whose results are not in the graph. The engine counts their memory,
    // but cannot evict it. `nbytes` is the change of that memory, which may be negative.
    void account(Nanoseconds cost, Bytes nbytes = 0, Bytes workspace = 0);
    // Event: the program resized `storage`, which its variables hold.
    void resize(Storage& storage, Bytes nbytes);
    // Restore `value` if it is evicted, because the caller is going to read it.
    void require(Value& value);

    // -- copies on the host ---------------------------------------------------------------------

    // Report from inside `Performer::swap_in` that the host copy of `storage` could not be read.
    // The engine forgets the copy. If `storage` cannot be recomputed, the performer throws instead,
    // and keeps the copy, which is the only one.
    void swap_in_failed(Storage& storage);
    // Event: a copy of `storage` to the host failed after the performer had started it. May be
    // called between any two actions. If `storage` is not in memory, it must be recomputed. The
    // bytes that the host holds now become its limit, as after `swap_out_failed`.
    void copy_lost(Storage& storage);
    // Swap in the source that the program uses next, in place of one that is used later. Called
    // after an operator. Does nothing before a step has ended.
    void anticipate();
    // Return the source that the program uses next, if `anticipate` should swap it in now; else
    // null.
    Storage* expected() const noexcept;
    // Swap in the evicted `storage` before its use, because a plan says so. Do nothing if `storage`
    // has no host copy.
    void fetch(Storage& storage);
    // Swap in values before they are needed, the most recently used first, while the budget has
    // room. Called after an operator of a backward pass, which needs the values in that order. Uses
    // at most `room` bytes, evicts nothing, and leaves some room for the next operators. A
    // prefetched value is locked until its first use, unless nothing else can be evicted.
    void prefetch(Bytes room = UNLIMITED);

private:
    // A recomputation may restart at most this many times for each call in the graph. One that
    // makes progress restarts less often.
    static constexpr std::size_t MOST_BEGUN = 100;

    // Time at which a call locks those of its inputs that are in memory: before or after its
    // evicted inputs are restored.
    enum class Locks : std::uint8_t { early, late };

    class Climb;
    class Waiting;
    class Saved;

    void note_value(Entry::Kind kind, const Value& value) noexcept;
    void note_call(Entry::Kind kind, const Call& call, bool held) noexcept;
    void save_from(Storage& storage, Saved& saved);
    void forget_quietly(Storage& storage);
    void require_quietly(Value& value);
    void enter(Call& call, bool held);
    void link(Call& call);
    void materialize(Call& call, Value* wanted, bool held);
    void climb(Call& call, Value* wanted, bool held, Locks locks);
    bool recomputes_in_order(Call& call, Value* wanted, bool held);
    void recompute_in_order(Call& call, Value* wanted, bool held);
    bool run_waiting(Waiting& waiting, Call& call, Value* wanted, bool held);
    void enqueue(Waiting& waiting, Call& call, Value* wanted);
    std::vector<Checkpoint> checkpoints_for(std::span<Call* const> calls);
    void restore_missing(Waiting& waiting, Value& missing);
    bool run_first(Waiting& waiting, bool held);
    void unlock_and_prune(const Call& call);
    void open(Call& call, Value* wanted, Locks locks);
    Value* next_missing();
    void close(const Frame& frame);
    void run(const Frame& frame, bool held);
    void readmit(const Frame& frame, bool in_place, bool lent);
    void drop_unasked(Call& call);
    void lend(const Call& call);
    bool copies(const Value& value) const;
    Nanoseconds climb_ns(const Value& value, Nanoseconds limit) const;
    void swap_in(Storage& storage, bool early = false);
    void forget_copy(Storage& storage);
    std::vector<Storage*> open_anew(std::size_t at);
    bool give_up(std::size_t first, std::vector<OpId>& gave_up);
    bool may_consume(const Frame& frame) const;
    Bytes bytes_beside(const Call& call, bool in_place) const;
    Bytes take_over(const Overwrite& overwrite);

    std::vector<Frame> frames_;     // One entry for each call whose recomputation is in progress.
    std::vector<Value*> pending_;   // Inputs of the calls in progress that are not locked yet.
    std::vector<Storage*> locked_;  // Storages that are locked for the calls in progress.
    // True if the last `Interlude` marked the storages that its call overwrites as evicted.
    bool lent_ = false;
    std::vector<Call*> running_;  // Calls that run now, in all threads.
};

}  // namespace rekindle
