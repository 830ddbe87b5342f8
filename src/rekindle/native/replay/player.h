// Drives an engine with a whole stream of events at once, and notes what it does: for the simulator
// and for tests, where nothing is computed. The stream is words of 64 bits.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "../base/slab.h"
#include "../base/types.h"
#include "../engine/engine.h"
#include "../engine/follower.h"

namespace rekindle {

// What a word says comes next, and what follows it. Values and storages are numbered by whoever
// writes the stream; where an event is about a storage it names one of its values.
enum class Word : std::int64_t {
    // operator, cost, flags, workspace; count and values read; count and (value, storage, bytes) of
    // what it
    // makes, where fewer than no bytes mean a view of the storage of that value; count and (output,
    // source) pairs
    call,
    use,         // value, nothing; so do all others have two
    pin,         // value
    retain,      // value
    release,     // value
    drop,        // value
    gone,        // value
    forget,      // value
    seal,        // value
    spoil,       // value
    account,     // cost, bytes
    resize,      // value, bytes
    require,     // value
    make_room,   // bytes
    shrink,      // bytes
    evict,       // the candidate of the least loss
    let_return,  // value, 0: no, 1: yes, 2: last
    lock,        // value
    unlock,      // value
    listen,
    clear_reserve,
    let,  // value: it is not named any more
    ahead,
    prefetch,   // bytes; negative: as much as there is room for
    discards,   //
    measured,   // bytes in a second out and in; 0: nothing new
    copy_lost,  // value
    fail,       // how many copies there and back until one fails, that can
};

// A stream that cannot be read; where.
struct Malformed final {
    std::size_t position;
};

struct PlainStorage final : Storage {
    using Storage::Storage;
};

struct PlainCall final : Call {
    using Call::Call;

    Bytes workspace = 0;
};

// One run. What happened until an exception is there.
class Player final : public Performer, public Host {
public:
    // What is done beside playing, as bits: `check` every invariant and note the state after each
    // event; go on after an event for which there was no room, which `forgive` notes.
    enum Watch : std::int64_t { steps_only = 1, check = 2, forgive = 4 };

    enum Flags : std::int64_t { replayable = 1, held = 2, admitted = 4 };

    // Actions are told as 8 * the storage, or the operator of a `Compute`, + one of these.
    enum Action : std::int64_t {
        freed = 0,
        computed = 1,
        computed_in_place = 2,
        swapped_out = 3,
        swapped_out_and_kept = 4,
        swapped_in = 5,
        discarded = 6,
        actions_end = 8
    };

    Player(
        Bytes budget,
        const Policy& policy,
        const Rules& rules,
        const Route* route,
        const Swap* swap,
        std::int64_t watch
    );
    Player(const Player&) = delete;
    Player& operator=(const Player&) = delete;
    Player(Player&&) = delete;
    Player& operator=(Player&&) = delete;
    ~Player() = default;

    // Throws `NoRoom`, `Thrashed`, `Malformed`. Returns the first fault, if it is to check.
    std::optional<Fault> play(std::span<const std::int64_t> words);

    const Engine& engine() const noexcept { return engine_; }

    Engine& engine() noexcept { return engine_; }

    // Bytes of all that is kept about the program, for one moment.
    std::size_t bookkeeping() const noexcept;

    std::vector<std::int64_t> actions;
    std::vector<Nanoseconds> clock;
    std::vector<Bytes> memory;
    // If it is to note them: actions (negative, less one: no room), memory and clock after each
    // event.
    std::vector<std::int64_t> steps;
    std::int64_t evictions = 0;
    std::int64_t recomputations = 0;

    // -- performing -----------------------------------------------------------------------------

    void compute(Call& call, bool in_place) override;
    void free(Storage& storage) override;
    bool swap_out(Storage& storage, bool keep) override;
    void swap_in(Storage& storage) override;
    void discard(Storage& storage) override;

    Bytes workspace(const Call& call) const noexcept override {
        return static_cast<const PlainCall&>(call).workspace;
    }

    void dispose(Storage& storage) noexcept override;
    void dispose(Call& call) noexcept override;

    void poll() override {}

    Storage& current(Storage& storage) override { return storage; }

    void own(Storage& /*storage*/) override {}

    void disown(Storage& /*storage*/) override {}

private:
    struct Known final {
        Ref<Storage> storage;
        Value* value = nullptr;
    };

    void acted(std::int64_t number, Action action);
    bool fails() noexcept;
    std::int64_t next();
    Known& known(std::int64_t value);
    // Whether there was room.
    bool step();
    void event(Word word);
    void event_about(Word word, Known& about, std::int64_t number);
    void event_call();
    Ref<Call> read_call(std::int64_t& flags, std::vector<Ref<Storage>>& made);
    void read_outputs(PlainCall& call, std::vector<Ref<Storage>>& made);
    void wanting(const Known& about);
    void evict_least_loss();

    const std::int64_t watch_;
    Slab<PlainStorage> storages_;
    Slab<PlainCall> calls_;
    Engine engine_;
    std::optional<Follower> follower_;
    std::vector<Known> known_;
    std::int64_t fail_in_ = -1;   // copies until one fails; negative: none does
    std::int64_t following_ = 0;  // the next operator to run for the first time
    std::span<const std::int64_t> words_;
    std::size_t position_ = 0;
    std::vector<Value*> inputs_;
    std::vector<Overwrite> overwrites_;
};

}  // namespace rekindle
