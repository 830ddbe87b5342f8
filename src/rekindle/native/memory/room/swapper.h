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
// - Swap-in: on a device, a `SwapIn` before its time only begins the copy from the host. The engine
//   treats the value as resident, and whoever reads it first waits for the copy (`finish`). A read
//   from a file may fail, so it is waited for at once.
// - A value without a recipe is evicted only after its copy on the host is complete.
//
// So decisions depend on the engine alone, and the machine affects only how long they take. There
// is one exception: if the user gave no bandwidth, a drop of the measured bandwidth is reported to
// the engine.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "../../engine/engine.h"
#include "../../torch/storage_ptr.h"
#include "../records/storage_record.h"
#include "../registry/registry.h"
#include "host_store.h"
#include "moved.h"

namespace rekindle {

// A transfer in flight between device and host, and the device memory that it reads or writes.
struct Moving final {
    StorageRecord* record;
    StoragePtr storage_impl;
};

// The host copies of values of one budget, and the transfers in flight. Every member needs the
// session mutex.
class Swapper final {
public:
    Swapper(Engine& engine, Registry& registry, _object* store);
    Swapper(const Swapper&) = delete;
    Swapper& operator=(const Swapper&) = delete;
    ~Swapper() = default;

    HostStore copies;
    bool complaint_due = false;  // a transfer failed, and Python was not notified yet
    // Copy values to the host before their room is needed. False in some tests, and once a copy has
    // failed.
    bool ahead = true;
    Moved moved;  // counts of finished copies

    // Run `events` while the engine regards every transfer as finished. A nested call only runs its
    // events.
    void perform(c10::function_ref<void()> events);
    // Suspend `perform`: other threads run events of their own now, while this event waits.
    void pause();
    // Resume `perform` after `pause`.
    void go_on();
    // Wait until `nbytes` that the engine regards as free are really free on the device. Return
    // false if a transfer fails.
    bool has_room(Bytes nbytes);
    // Wait until `nbytes` more fit on the device, or until no swap-out is in flight.
    void wait_for(Bytes nbytes);
    // Wait until no swap-out (copy to the host) is in flight.
    void wait_for_all();

    // Start to copy the value of `record` to the host. Return false if that is impossible. For a
    // value without a recipe, wait until the copy is complete.
    bool begin(StorageRecord& record);
    // Return true if the program has written `record`, which has no recipe, since it was copied.
    // Most writes announce themselves (`Events::about_to_write`). This also finds those that only a
    // version counter shows.
    bool is_copy_outdated(const StorageRecord& record) const;
    // The value of `record` was evicted. memory: the memory of the value, which a swap-out in
    // flight still reads.
    void gone(StorageRecord& record, StoragePtr memory);
    // Wait for the swap-out of `record`, because its memory is about to be written.
    void finish_swap_out(StorageRecord& record);
    // Swap the value of `record` in; the caller has made room. Return its memory, or null if there
    // is no host copy. If `early`, do not wait for a copy on a device: `finish` does.
    StoragePtr fetch(StorageRecord& record, bool early);
    // Wait for the swap-in of `record`, whose value is about to be read.
    void finish(StorageRecord& record);
    // Remember that the value of `record` was recomputed or restored although it has a host copy.
    void returned(StorageRecord& record);
    // Free the host copy of `record`.
    void discard(StorageRecord& record);

    // Return the text of the first invariant that does not hold, or null. Must be called between
    // events.
    const char* fault() const;

private:
    // The copy of a value on the host.
    struct HostCopy final {
        std::int64_t version;  // count of the value's version counter then; negative: unknown
        bool written = true;   // False if the program had freed the value: there is no copy.
        // The value was read from the copy while its version was unknown. The first tensor by which
        // an operator then reads it has the version of the copy (`Version::expected`). Scenario:
        // autograd has put a gradient into a new tensor, which no operator has read yet.
        bool seen_later = false;
    };

    Bytes in_flight() const noexcept;
    void count(Bytes nbytes);
    std::string wait(const StorageRecord& record);
    bool ended(StorageRecord& record);
    void finish_write(StorageRecord& record);
    void handle_failed_write(StorageRecord& record, const StoragePtr& storage_impl);
    void report_streams();
    std::string read(StorageRecord& record);
    std::string read_now(StorageRecord& record);
    std::string end_swap_in(StorageRecord& record);
    void give_up_copy(StorageRecord& record, const std::string& why, bool keeps);

    Engine& engine_;
    Registry& registry_;
    // Records that have a host copy, complete or still being written.
    std::unordered_map<const StorageRecord*, HostCopy> copied_;
    // Swap-outs in flight, the oldest first.
    std::vector<Moving> writes_in_flight_;
    // early swap-ins in flight, of records that the engine regards as in memory
    std::vector<Moving> reads_in_flight_;
    bool performing_ = false;  // true while `perform` runs events
    Bytes counted_ = 0;        // bytes of transfers in flight that the engine counts between events
    // number of the program's streams that `report_streams` has passed to `copies`, the host store
    std::size_t known_streams_ = 0;
};

}  // namespace rekindle
