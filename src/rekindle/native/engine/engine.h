// Dynamic Tensor Rematerialization: decides online what to let go and what to compute again. Twin
// of rekindle.engine._engine, action by action, where what differs from the paper is explained.
//
// Events come in as calls of the methods below, actions go out to a `Performer`. No torch, no
// clock, no lock: the engine's clock is the sum of the costs of what ran, and the driver's lock
// guards it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ledger.h"

namespace rekindle {

// Keeps `memory` within `budget` bytes. Events, and bringing back; a `Ledger` lets go. Every event
// may throw what the performer throws, `NoRoom` and `Thrashed`; the invariants hold afterwards.
class Engine final : public Ledger {
public:
    // `advised`: the policy follows advice first, as that of a `Follower`. `own`: chooses in the
    // place of `policy`. The performer, and the slabs that it keeps storages and calls in, must
    // outlive the engine; no `Ref` may.
    Engine(
        Bytes most,
        Performer& performer,
        const Policy& policy = THRIFTY,
        bool advised = false,
        const Rules& how = {},
        std::unique_ptr<Chooser> own = nullptr
    );
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;
    Engine(Engine&&) = delete;
    Engine& operator=(Engine&&) = delete;
    ~Engine() = default;

    // Amid `compute`: while it lives the engine may hear of other events, of other threads or of
    // what the call itself does. What the call takes is in flight, and what it overwrites is gone.
    // The event in progress gathers again what it has lost, if anybody came.
    class Interlude final {
    public:
        Interlude(Engine& engine, const Call& call, bool in_place);
        // Not amid `compute`, but where the policy is asked: nothing is in flight or overwritten.
        explicit Interlude(Engine& engine);
        Interlude(const Interlude&) = delete;
        Interlude& operator=(const Interlude&) = delete;
        Interlude(Interlude&&) = delete;
        Interlude& operator=(Interlude&&) = delete;
        ~Interlude();

        // Somebody came.
        void visited() noexcept { ++engine_.visits_; }

        // The call failed before it wrote anything, and nobody came: what it overwrites is there.
        void give_back(const Call& call);

    private:
        Engine& engine_;
        std::vector<Frame> frames_;
        std::vector<Value*> pending_;
        std::vector<Storage*> locked_;
        const Bytes taken_;
        const int amid_;
        bool lent_;
    };

    // -- events ---------------------------------------------------------------------------------

    // The program runs `call` for the first time; its inputs are brought back if need be.
    void call(Call& call, bool held);
    // `call` ran for the first time, and room was made for it before. Links its outputs.
    void admit(Call& call, bool held);
    // The program reads `value`: it is brought back if need be, and is held from now on.
    void use(Value& value);
    // `value` is brought back if need be, and stays until nobody needs it.
    void pin(Value& value);
    // One more reference that permits eviction.
    void retain(Storage& storage);
    // One reference less.
    void release(Storage& storage);
    // The program's own variables hold the storage no longer.
    void drop(Storage& storage);
    // The program has dropped `storage`, to which nobody else refers: its memory is free. Frees it
    // all the same, and what it alone needed.
    void gone(Storage& storage);
    // The source `storage` is about to be overwritten: what still needs it is saved first.
    void forget(Storage& storage);
    // Nobody knows how the content of `storage`, which is resident, came about: it is kept.
    void seal(Storage& storage);
    // A call that was to overwrite `storage`, which is dead, failed half way: it is gone. Amid
    // `compute`, or as an event.
    void spoil(Storage& storage);
    // An operator ran that made nothing, or `nbytes` that are only counted; negative: less.
    void account(Nanoseconds cost, Bytes nbytes = 0, Bytes workspace = 0);
    // The program itself changed the size of `storage`, which it holds.
    void resize(Storage& storage, Bytes nbytes);
    // `value` is brought back if need be, for whoever will ask for it.
    void require(Value& value);

    // -- copies on the host, where there is one -------------------------------------------------

    // The performer could not do the `swap_in` of `storage` that it just got: its copy is
    // forgotten. Returns whether it will be computed again; else it is lost, and the performer
    // should throw.
    bool swap_in_failed(Storage& storage);
    // A copy that the performer had reported as made never arrived. Between any two actions. What
    // is not in memory has to be computed again. As after `swap_out_failed`, as much as is on the
    // host now is all that may be there from now on.
    void copy_lost(Storage& storage);
    // Brings back what is on the host while there is room for it, what was used last first. After
    // an operator of a backward pass: what was saved last is wanted first. Takes no more than
    // `room` bytes, nothing has to go for it, and some room is left for what comes next. What came
    // stays until it is used, unless nothing else is left to let go.
    void prefetch(Bytes room = UNLIMITED);

private:
    enum class Locks : std::uint8_t { early, late };

    class Climb;
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
    void open(Call& call, Value* wanted, Locks locks);
    Value* next_missing();
    void close(const Frame& frame);
    void run(const Frame& frame, bool held);
    void readmit(const Frame& frame, bool in_place, bool lent);
    void drop_unasked(Call& call);
    void lend(const Call& call);
    static bool is_missing(const Value& value) noexcept;
    bool copies(const Value& value) const;
    Nanoseconds climb_ns(const Value& value, Nanoseconds limit) const;
    void swap_in(Storage& storage);
    bool forget_copy(Storage& storage);
    std::vector<Storage*> open_anew(std::size_t at);
    bool give_up(std::size_t first);
    bool may_consume(const Frame& frame) const;
    static bool can_run(const Frame& frame);
    Bytes bytes_beside(const Call& call, bool in_place) const;
    Bytes take_over(const Overwrite& overwrite);
    template <class F>
    void outputs_but_last(Call& call, const Value* wanted, F&& visit);

    std::vector<Frame> frames_;     // calls in progress
    std::vector<Value*> pending_;   // their inputs still to be had
    std::vector<Storage*> locked_;  // what is locked for them
    bool lent_ = false;             // the last interlude: what the call overwrites was gone
};

}  // namespace rekindle
