// Replays a recorded stream of a program's events in an engine, and collects the engine's actions,
// for the simulator and for tests. No tensor is computed. The stream consists of 64-bit words.
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

// First word of an event in the stream; the event's arguments follow. The writer of the stream
// gives numbers to values and storages. An event about a storage gives the number of one of its
// values.
enum class Word : std::int64_t {
    // An operator call. Arguments: operator, cost (ns), flags, workspace (bytes);
    // - n, then n values that the call reads;
    // - n, then n outputs: value, storage, bytes. Negative bytes mean a view; `storage` is then the
    //   number of a value in the storage of the base;
    // - n, then n overwritten inputs: output, source.
    call,
    use,        // arguments: a value, unused; all events below have two arguments, maybe unused
    pin,        // argument: a value
    retain,     // argument: a value
    release,    // argument: a value
    drop,       // argument: a value
    gone,       // argument: a value
    forget,     // argument: a value
    seal,       // argument: a value
    spoil,      // argument: a value
    account,    // arguments: cost (ns), bytes
    resize,     // arguments: a value, bytes
    require,    // argument: a value
    make_room,  // argument: bytes
    shrink,     // argument: bytes
    evict,      // evicts the storage whose eviction costs least by the policy
    // arguments: a value; 0: never evict it while held, 1: also while held, 2: as a last resort
    set_evictable_while_held,
    lock,    // argument: a value
    unlock,  // argument: a value
    listen,
    clear_reserve,
    let,  // argument: a value whose number the stream does not use any more
    ahead,
    prefetch,  // argument: bytes; negative: as many as fit
    // argument: 1 if a plan decides from now on which values to copy, 0 if the engine does
    planned,
    save,        // argument: a value
    fetch,       // argument: a value
    discards,    //
    measured,    // arguments: bytes per second of swap-out, swap-in; 0: unchanged
    copy_lost,   // argument: a value
    written,     // argument: a value
    outdate,     // argument: a value whose host copy has old contents from now on
    hold,        // argument: a value
    step,        //
    anticipate,  //
    // argument: number of transfers until one fails, not counting transfers that cannot fail
    fail,
};

// Error: the stream of events is invalid at the word `position`.
struct Malformed final {
    std::size_t position;
};

// A simulated storage, which has no memory.
struct PlainStorage final : Storage {
    using Storage::Storage;

    bool outdated = false;  // the host copy has old contents
};

// A simulated operator call, which has no operator.
struct PlainCall final : Call {
    using Call::Call;

    Bytes workspace = 0;
};

// Replays one stream of events. After an exception, the results up to the failed event remain.
class Player final : public Performer, public Host {
public:
    // Bits that say what to record. `steps_only`: the state after each event. `check`: also check
    // all invariants after each event. `forgive`: continue after an event that failed because the
    // budget had no room, and record this failure.
    enum Watch : std::int64_t { steps_only = 1, check = 2, forgive = 4 };

    enum Flags : std::int64_t { replayable = 1, held = 2, admitted = 4, deferred = 8 };

    // An action is recorded as 8 * storage (or operator, for a `Compute`) + one of these constants.
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
        Nanoseconds recompute_limit,
        const Route* route,
        const Swap* swap,
        std::int64_t watch
    );
    Player(const Player&) = delete;
    Player& operator=(const Player&) = delete;
    ~Player() = default;

    // Replay the stream `words`. Throw `NoRoom`, `Thrashed` or `Malformed`. If `check` is set,
    // return the first violated invariant.
    std::optional<Fault> play(std::span<const std::int64_t> words);

    Engine& engine() noexcept { return engine_; }

    // Return the bytes of the engine's own data about the program.
    std::size_t bookkeeping() const noexcept;

    std::vector<std::int64_t> actions;
    std::vector<Nanoseconds> clock;
    std::vector<Bytes> memory;
    // With `steps_only` or `check`, three words per event: number of actions so far, memory, clock.
    // If the budget had no room for the event, the first word is the bitwise complement.
    std::vector<std::int64_t> steps;
    std::int64_t evictions = 0;
    std::int64_t recomputations = 0;

    // -- actions of the engine ------------------------------------------------------------------

    void compute(Call& call, bool in_place) override;
    void free(Storage& storage) override;
    bool swap_out(Storage& storage, bool keep) override;
    void swap_in(Storage& storage, bool early) override;
    void discard(Storage& storage) override;

    bool is_copy_outdated(Storage& storage) override {
        return static_cast<PlainStorage&>(storage).outdated;
    }

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
    // Replay one event. Return false if the budget had no room for it.
    bool step();
    void event(Word word);
    void event_about(Word word, Known& about, std::int64_t number);
    void event_call();
    Ref<Call> read_call(std::int64_t& flags, std::vector<Ref<Storage>>& made);
    void read_outputs(PlainCall& call, std::vector<Ref<Storage>>& made);
    void about_to_access(const Known& about);
    void evict_least_loss();

    const std::int64_t watch_;
    Slab<PlainStorage> storages_;
    Slab<PlainCall> calls_;
    Engine engine_;
    std::optional<Follower> follower_;
    std::vector<Known> known_;
    std::int64_t fail_in_ = -1;   // Number of transfers until one fails; negative: none.
    std::int64_t following_ = 0;  // Id of the next call to run for the first time.
    std::span<const std::int64_t> words_;
    std::size_t position_ = 0;
    std::vector<Value*> inputs_;
    std::vector<Overwrite> overwrites_;
};

}  // namespace rekindle
