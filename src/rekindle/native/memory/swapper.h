// Swaps values to the host and back while the program computes.
//
// NOTE [Transfers take time]
//
// The engine decides as if transfers took no time. It knows which storages are resident, on the
// host, or both. The swapper hides the time that transfers take:
//
// - Out: a write continues after `SwapOut`, and its memory is not free until it has finished. The
//   engine treats that memory as free. Between events it is therefore added to the engine's count,
//   and an allocation that needs the room waits.
// - In: a read may begin before `SwapIn`, into free room of the budget, in reverse order of saving.
//   It is counted in the same way, and cancelled if an operator needs the room.
// - A value without a recipe is evicted only after its copy is complete.
//
// So decisions depend on the engine alone, and only their duration depends on the machine. The one
// exception is a bandwidth that was measured, not given: the engine is told if it falls.
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

// Copies on the host for one driver, and the transfers in flight. Every member needs the lock.
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
    bool complaint_due = false;  // a failure was not reported yet
    bool ahead = true;           // copy values before room is needed; false only in a test

    // Run `events`, in which the engine treats every transfer as finished. Nested calls are part of
    // the outermost one.
    void perform(c10::function_ref<void()> events);
    // Suspend `perform` while other threads perform events of their own.
    void pause();
    // Resume `perform`.
    void go_on();
    // Wait until the room that the engine has for `nbytes` more is free. Return false if it is not.
    bool has_room(Bytes nbytes);
    // Wait until `nbytes` more fit or no transfer is in flight. Cancels early reads first.
    void wait_for(Bytes nbytes);
    // Wait until no transfer is in flight.
    void wait_for_all();

    // Start to copy the resident `record` to the host. Return false if that is impossible. A value
    // without a recipe has a complete copy when this returns true.
    bool begin(StorageRecord& record);
    // Note that `record` was evicted. If it has a copy, it can be swapped in.
    void gone(StorageRecord& record);
    // Finish the copy of `record` before its memory may be written.
    void process_pending(StorageRecord& record);
    // Read the copy of `record` into memory, for which there is room. Return null if it has no
    // copy.
    StoragePtr fetch(StorageRecord& record);
    // Note that `record` was recomputed although it has a copy.
    void returned(StorageRecord& record);
    // Free the copy of `record`.
    void discard(StorageRecord& record);

    // Return the first invariant that does not hold, or null. Must be called between events.
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
    std::unordered_set<const StorageRecord*> there_;  // records whose copy is complete or in flight
    // Writes in flight, the oldest first.
    Moves leaving_;
    Moves coming_;
    std::vector<StorageRecord*> away_;  // evicted records with a copy, by id
    std::optional<StorageId> wanted_;   // id of the record that was swapped in last
    bool performing_ = false;           // within `perform`
    Bytes counted_ = 0;                 // bytes in flight that the engine counts between events
    std::size_t told_ = 0;              // streams of the program that `copies` knows
};

}  // namespace rekindle
