// Moves values to the host and back while the program computes.
//
// The engine knows which storages are in memory, on the host, or both. What it does not know is
// time:
//
// - A write goes on after `SwapOut` was performed. Until it has ended its memory is not free,
// though
//   the engine takes it for gone: between events it counts as memory in no storage, and what needs
//   the room waits.
// - Reading begins before `SwapIn` is asked for, into room that the budget has left: last saved,
//   first wanted. It counts likewise, and whoever needs the room gets it.
// - What cannot be computed again is let go only when its copy is there.
//
// So what is done depends on the engine alone, and only how long it takes depends on the machine;
// but where the bandwidth was measured and not given, the engine hears if it falls.
#pragma once

#include <c10/util/FunctionRef.h>

#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "../engine/engine.h"
#include "../torch/homes.h"
#include "copies.h"
#include "record.h"

namespace rekindle {

class Driver;

// The copies on the host for one driver, and what is on its way there and back. With its lock.
class Swapper final {
public:
    // The driver outlives it.
    Swapper(Driver& driver, _object* asked);
    Swapper(const Swapper&) = delete;
    Swapper& operator=(const Swapper&) = delete;
    Swapper(Swapper&&) = delete;
    Swapper& operator=(Swapper&&) = delete;
    ~Swapper() = default;

    Copies copies;
    bool complaint_due = false;  // something went wrong, and nobody was told
    bool ahead = true;           // copies are made ahead of need: off in a test

    // Runs `events`, in which the engine decides as if every transfer were over. They do not nest:
    // what is amid others is part of those.
    void amid(c10::function_ref<void()> events);
    // Amid `events` others come with events of their own, until `go_on`.
    void pause();
    void go_on();
    // Whether the room that the engine has for `nbytes` more is there; waits for it, first.
    bool has_room(Bytes nbytes);
    // Until `nbytes` more fit, or nothing is under way: gives up what was read ahead first.
    void wait_for(Bytes nbytes);
    // Until nothing is under way.
    void wait_for_all();

    // Begins to copy the resident `record` to the host. False: it cannot be, or was not. What
    // cannot be computed again is there when this returns.
    bool begin(Record& record);
    // The memory of `record` was let go. If it has a copy it can come back.
    void gone(Record& record);
    // Somebody may write where `record` is: its copy is made first.
    void settle(Record& record);
    // The content of `record` in memory, for which there is room; null: it has no copy.
    Home fetch(Record& record);
    // `record` was computed again, although there is a copy.
    void returned(Record& record);
    // Nobody needs the copy of `record` any more.
    void discard(Record& record);

    // The first invariant that does not hold; between events.
    const char* fault() const;

private:
    // A write or a read that was begun, and the memory at its end.
    struct Moving final {
        Record* record;
        Home home;
    };

    using Moves = std::vector<Moving>;

    static bool has(const Moves& moves, const Record& record) noexcept;
    static Home take(Moves& moves, const Record& record);
    Bytes in_flight() const noexcept;
    void count(Bytes nbytes);
    std::string wait(const Record& record);
    bool ended(Record& record);
    void arrive(Record& record);
    void not_written(Record& record, const Home& home);
    void tell_streams();
    std::string read(Record& record);
    std::string read_now(Record& record);
    void read_ahead();
    void give_up(Record& record);
    std::vector<Record*>::iterator place_of(StorageId number);
    bool is_away(const Record& record);
    void leave_away(const Record& record);
    void forget(Record& record, const std::string& why);

    Driver& driver_;
    Engine& engine_;
    std::unordered_set<const Record*> there_;  // copies that are there, or on their way
    Moves leaving_;                            // the oldest first
    Moves coming_;
    std::vector<Record*> away_;        // on the host alone, by id
    std::optional<StorageId> wanted_;  // what came back last
    bool amid_ = false;                // an event is being acted on
    Bytes counted_ = 0;                // by the engine for us, between events
    std::size_t told_ = 0;             // how many of the program's streams the copies know
};

}  // namespace rekindle
