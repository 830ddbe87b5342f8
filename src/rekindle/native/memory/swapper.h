// Swaps values out to the host and back in while the program computes.
//
// NOTE [Transfers take time]
//
// The engine decides as if transfers took no time. The engine knows which storages are resident, on
// the host, or both. The swapper hides the time that transfers take:
//
// - Swap-out: the copy to the host continues after `SwapOut`, and the value's memory is not free
//   until the copy has finished. The engine treats that memory as free. Between events the swapper
//   therefore adds it to the engine's count, and an allocation that needs the room waits.
// - Swap-in: a copy from the host may begin before `SwapIn`, into free room of the budget. Values
//   saved last come first, as the backward pass needs them. The room is counted in the same way,
//   and an early copy is cancelled if an operator needs its room.
// - A value without a recipe is evicted only after its copy on the host is complete.
//
// So decisions depend on the engine alone, and the machine affects only how long they take. There
// is one exception: if the user gave no bandwidth, a drop of the measured bandwidth is reported to
// the engine.
#pragma once

#include <c10/util/FunctionRef.h>

#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "../engine/engine.h"
#include "../torch/storage_ptr.h"
#include "host_store.h"
#include "storage_record.h"

namespace rekindle {

class Driver;

// Copies on the host for one driver, and the transfers in flight. Every member needs the session
// mutex.
class Swapper final {
public:
    // The driver must outlive the swapper.
    Swapper(Driver& driver, _object* asked);
    Swapper(const Swapper&) = delete;
    Swapper& operator=(const Swapper&) = delete;
    Swapper(Swapper&&) = delete;
    Swapper& operator=(Swapper&&) = delete;
    ~Swapper() = default;

    HostStore copies;
    bool complaint_due = false;  // a transfer failed, and Python was not notified yet
    bool ahead = true;  // copy values to the host before their room is needed; false only in a test

    // Run `events`, during which the engine treats every transfer as finished. A nested call only
    // runs its events.
    void perform(c10::function_ref<void()> events);
    // Suspend `perform` while other threads perform events of their own.
    void pause();
    // Resume `perform`.
    void go_on();
    // Wait until `nbytes` that the engine counts as free are really free. Return false if that
    // fails.
    bool has_room(Bytes nbytes);
    // Wait until `nbytes` more fit, or until no transfer is in flight. Cancel early swap-ins first.
    void wait_for(Bytes nbytes);
    // Wait until no transfer is in flight.
    void wait_for_all();

    // Start to copy the resident `record` to the host. Return false if that is impossible. For a
    // value without a recipe, wait until the copy is complete.
    bool begin(StorageRecord& record);
    // Note that `record` was evicted. If it has a copy on the host, it can be swapped in.
    void gone(StorageRecord& record);
    // Finish the copy of `record` to the host, because its memory is about to be written.
    void process_pending(StorageRecord& record);
    // Swap `record` in; the caller has made room. Return its memory, or null if there is no copy on
    // the host.
    StoragePtr fetch(StorageRecord& record);
    // Note that `record` was recomputed although it has a copy on the host.
    void returned(StorageRecord& record);
    // Free the copy of `record` on the host.
    void discard(StorageRecord& record);

    // Return the text of the first invariant that does not hold, or null. Must be called between
    // events.
    const char* fault() const;

private:
    // A transfer in flight, and the memory that it reads or writes.
    struct Moving final {
        StorageRecord* record;
        StoragePtr storage_impl;
    };

    using Moves = std::vector<Moving>;

    static bool has(const Moves& moves, const StorageRecord& record) noexcept;
    static StoragePtr take(Moves& moves, const StorageRecord& record);
    Bytes in_flight() const noexcept;
    void count(Bytes nbytes);
    std::string wait(const StorageRecord& record);
    bool ended(StorageRecord& record);
    void arrive(StorageRecord& record);
    void not_written(StorageRecord& record, const StoragePtr& storage_impl);
    void tell_streams();
    std::string read(StorageRecord& record);
    std::string read_now(StorageRecord& record);
    void read_ahead();
    void give_up(StorageRecord& record);
    std::vector<StorageRecord*>::iterator place_of(StorageId number);
    bool is_away(const StorageRecord& record);
    void leave_away(const StorageRecord& record);
    void forget(StorageRecord& record, const std::string& why);

    Driver& driver_;
    Engine& engine_;
    // Records with a copy on the host, complete or in flight.
    std::unordered_set<const StorageRecord*> there_;
    // Swap-outs in flight, the oldest first.
    Moves leaving_;
    Moves coming_;
    std::vector<StorageRecord*> away_;  // evicted records with a copy on the host, sorted by id
    std::optional<StorageId> wanted_;   // id of the record that was swapped in last
    bool performing_ = false;           // `perform` is running events
    Bytes counted_ = 0;                 // bytes in flight that the engine counts between events
    std::size_t told_ = 0;              // number of the program's streams that `copies` knows
};

}  // namespace rekindle
