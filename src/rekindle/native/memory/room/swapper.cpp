#include "swapper.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <span>
#include <utility>

#include "../../torch/backward.h"

namespace rekindle {

namespace {

// Return the count of the version counter of the program's tensor with the value of `record`, or a
// negative number if it is unknown.
std::int64_t version_of(const StorageRecord& record) {
    const auto tensor = record.origin.lock();
    return tensor ? Version::count_of(tensor->version_counter()) : -1;
}

// Remove the transfer of `record` from `moves`, the transfers in flight. Return the memory that the
// transfer reads or writes.
StoragePtr take(std::vector<Moving>& moves, const StorageRecord& record) {
    const auto found =
        std::ranges::find_if(moves, [&](const Moving& each) { return each.record == &record; });
    StoragePtr storage_impl = std::move(found->storage_impl);
    moves.erase(found);
    return storage_impl;
}

}  // namespace

Swapper::Swapper(Engine& engine, Registry& registry, _object* store)
    : copies(store), engine_(engine), registry_(registry) {}

// -- time -----------------------------------------------------------------------------------------

void Swapper::perform(c10::function_ref<void()> events) {
    if (performing_) {
        events();
        return;
    }
    performing_ = true;
    count(0);
    try {
        events();
    } catch (...) {
        performing_ = false;
        count(in_flight());
        throw;
    }
    performing_ = false;
    count(in_flight());
}

void Swapper::pause() {
    performing_ = false;
    count(in_flight());
}

void Swapper::go_on() {
    count(0);
    performing_ = true;
}

bool Swapper::has_room(Bytes nbytes) {
    wait_for(nbytes);
    return engine_.budget == UNLIMITED || engine_.memory + nbytes <= engine_.budget;
}

void Swapper::wait_for(Bytes nbytes) {
    while (!writes_in_flight_.empty() && copies.ended(writes_in_flight_.front().record->id)) {
        finish_write(*writes_in_flight_.front().record);
    }
    // If a copy fails, its value stays, and the engine counts it again.
    const auto fits = [&] {
        return engine_.memory - counted_ + in_flight() + nbytes <= engine_.budget;
    };
    while (engine_.budget != UNLIMITED && !writes_in_flight_.empty() && !fits()) {
        finish_write(*writes_in_flight_.front().record);
    }
    if (!performing_) {
        count(in_flight());
    }
}

void Swapper::wait_for_all() {
    while (!writes_in_flight_.empty()) {
        finish_write(*writes_in_flight_.front().record);
    }
}

// Return the bytes that swap-outs in flight still occupy on the device, although the engine regards
// these bytes as free.
Bytes Swapper::in_flight() const noexcept {
    Bytes nbytes = 0;
    for (const Moving& each : writes_in_flight_) {
        nbytes += each.record->resident ? 0 : each.record->nbytes;
    }
    return nbytes;
}

// Let the engine count `nbytes` of memory for transfers in flight. This number replaces that of the
// previous call.
void Swapper::count(Bytes nbytes) {
    if (nbytes != counted_) {
        engine_.account(0, nbytes - counted_);
        counted_ = nbytes;
    }
}

// Tell the host store about each device stream that the program has started to use since the last
// call. A copy waits for the work queued on all these streams, and later work waits for the copy.
void Swapper::report_streams() {
    if (!registry_.device.queues()) {
        return;
    }
    registry_.device.see();
    const auto& seen = registry_.device.streams.seen();
    while (known_streams_ < seen.size()) {
        copies.add_stream(seen[known_streams_++]);
    }
}

// Wait until the transfer of `record` between device and host has finished. Return the reason if it
// failed, else an empty string.
std::string Swapper::wait(const StorageRecord& record) {
    report_streams();
    HostStore::End end = copies.wait(record.id);
    if (end.out_bytes_per_s != 0 || end.in_bytes_per_s != 0) {
        engine_.measured(end.out_bytes_per_s, end.in_bytes_per_s);
    }
    return std::move(end.why);
}

// -- swapping out ---------------------------------------------------------------------------------

bool Swapper::begin(StorageRecord& record) {
    const StoragePtr storage_impl = record.at();
    if (!storage_impl) {
        // Another thread or the garbage collector has freed the value, which the engine learns
        // later. That is no failure, after which the engine would copy less.
        copied_[&record] = HostCopy{-1, false};
        return true;
    }
    if (std::cmp_not_equal(storage_impl->nbytes(), record.size)) {
        return false;
    }
    report_streams();
    if (!copies.write(record.id, storage_impl)) {
        return false;
    }
    copied_[&record] = HostCopy{version_of(record)};
    writes_in_flight_.push_back({&record, storage_impl});
    record.leaving = true;
    return record.replayable || ended(record);
}

bool Swapper::is_copy_outdated(const StorageRecord& record) const {
    if (!record.at() || !is_held_but_evictable(record) || record.leaving || record.coming) {
        return false;
    }
    const HostCopy& copy = copied_.at(&record);
    const std::int64_t version = version_of(record);
    return version < 0 || version != (copy.seen_later ? record.version.expected : copy.version);
}

void Swapper::gone(StorageRecord& record, StoragePtr memory) {
    // if the value was swapped in early, and is evicted again before anything read it, end the
    // swap-in
    if (record.coming) {
        static_cast<void>(end_swap_in(record));
    }
    if (record.leaving && record.placeholder && memory) {
        // the storage of the program has no memory any more
        std::ranges::find(writes_in_flight_, &record, &Moving::record)->storage_impl =
            std::move(memory);
    }
    if (record.leaving && !performing_) {
        count(in_flight());
    }
}

void Swapper::finish_swap_out(StorageRecord& record) {
    if (record.leaving) {
        finish_write(record);
    }
}

// Wait for the swap-out of `record`, which the engine regards as finished. Undo the eviction if the
// copy to the host failed.
void Swapper::finish_write(StorageRecord& record) {
    const auto is_it = [&](const Moving& each) { return each.record == &record; };
    const StoragePtr storage_impl = std::ranges::find_if(writes_in_flight_, is_it)->storage_impl;
    if (!ended(record)) {
        handle_failed_write(record, storage_impl);
    }
}

// Handle a failed swap-out of `record`. The value is still on the device, in `storage_impl`.
void Swapper::handle_failed_write(StorageRecord& record, const StoragePtr& storage_impl) {
    // The next copy to the host may fail too, and a failure may take long. So from now on copy
    // values only when their room is needed, not ahead of time.
    ahead = false;
    const bool gone = record.on_host && !record.resident;
    // If the recipe of `record` was dropped during the failed copy, the value must stay in memory.
    if (gone && !record.replayable) {
        engine_.swap_out_failed(record);
        registry_.attach(record, storage_impl);
    } else {
        engine_.copy_lost(record);
    }
}

// Wait for the swap-out of `record`. Return true if the host copy is complete.
bool Swapper::ended(StorageRecord& record) {
    const StoragePtr storage_impl = take(writes_in_flight_, record);
    record.leaving = false;
    const std::string why = wait(record);
    if (!why.empty()) {
        give_up_copy(record, "written: " + why, false);
        return false;
    }
    moved.went_out(record);
    return true;
}

// -- swapping in ----------------------------------------------------------------------------------

StoragePtr Swapper::fetch(StorageRecord& record, bool early) {
    if (record.leaving) {  // the swap-out has not finished, so the value is still in device memory
        const auto is_it = [&](const Moving& each) { return each.record == &record; };
        StoragePtr storage_impl = std::ranges::find_if(writes_in_flight_, is_it)->storage_impl;
        if (ended(record)) {
            return storage_impl;
        }
        handle_failed_write(record, storage_impl);
        return {};
    }
    if (const auto found = copied_.find(&record);
        found != copied_.end() && !found->second.written) {
        if (record.replayable) {
            copied_.erase(found);
        }
        return {};
    }
    wait_for(record.nbytes);
    std::string why = read_now(record);
    StoragePtr storage_impl;
    if (why.empty()) {
        storage_impl = reads_in_flight_.back().storage_impl;
        // A read from a file may fail, and the engine must know of a failure at once, so wait for
        // it. On a device, streams wait for the read, so this thread need not.
        why = early && registry_.device.queues() ? "" : end_swap_in(record);
    }
    if (!why.empty()) {
        // Keep the copy if there is no other, because a later attempt may succeed.
        give_up_copy(record, "read back: " + why, !record.replayable);
        return {};
    }
    HostCopy& copy = copied_.at(&record);
    copy.seen_later = copy.version < 0;
    return storage_impl;
}

void Swapper::finish(StorageRecord& record) {
    if (!record.coming) {
        return;
    }
    if (const std::string why = end_swap_in(record); !why.empty()) {
        give_up_copy(record, "read back: " + why, false);
        engine_.copy_lost(record);
        throw SwapReadError(record.site());
    }
}

// Wait for the swap-in of `record`, which was started before the value was needed. Return the
// reason if it failed, else an empty string.
std::string Swapper::end_swap_in(StorageRecord& record) {
    const StoragePtr kept = take(reads_in_flight_, record);
    record.coming = false;
    std::string why = wait(record);
    if (why.empty()) {
        moved.came_in(record);
    }
    return why;
}

void Swapper::returned(StorageRecord& record) {
    finish_swap_out(record);
}

void Swapper::discard(StorageRecord& record) {
    returned(record);
    finish(record);
    const auto found = copied_.find(&record);
    if (found == copied_.end()) {
        return;  // the copy to the host has failed before
    }
    if (found->second.written) {
        copies.release(record.id);
    }
    copied_.erase(found);
}

// Start to copy `record` from the host to the device. Return the reason if that is impossible, else
// an empty string.
std::string Swapper::read(StorageRecord& record) {
    report_streams();
    const StoragePtr storage_impl =
        allocate_storage(static_cast<std::size_t>(record.size), registry_.device.which());
    registry_.device.keep_until_read(*storage_impl);
    std::string why = copies.read(record.id, storage_impl);
    if (why.empty()) {
        reads_in_flight_.push_back({&record, storage_impl});
        record.coming = true;
    }
    return why;
}

// Start to swap in `record`, like `read`. If the device has no room, finish all other transfers and
// try again. Return the reason of a failure, else an empty string.
std::string Swapper::read_now(StorageRecord& record) {
    try {
        return read(record);
    } catch (const std::exception& error) {
        if (!is_device_oom(error)) {
            throw;
        }
    }
    wait_for_all();
    if (registry_.device.queues()) {
        registry_.device.empty_cache();
    }
    return read(record);
}

// -- failed transfers and invariants --------------------------------------------------------------

// Report that the host copy of `record` could not be written or read, for the reason `why`. Forget
// the copy unless `keeps`.
void Swapper::give_up_copy(StorageRecord& record, const std::string& why, bool keeps) {
    complaint_due = true;
    copies.complain_of(record.nbytes, record.site(), why);
    if (!keeps) {
        copies.release(record.id);
        copied_.erase(&record);
    }
}

const char* Swapper::fault() const {
    std::size_t copied = 0;
    for (Storage* each = engine_.first_storage(); each != nullptr; each = each->next) {
        const auto& record = record_of(*each);
        if (record.on_host != copied_.contains(&record)) {
            return "a copy is not where the engine knows it";
        }
        if (record.leaving && !record.on_host) {
            return "what is on its way to the host has no copy";
        }
        if (record.coming && !(record.resident && record.on_host)) {
            return "what is on its way back is not resident";
        }
        copied += record.on_host ? 1 : 0;
    }
    return copied == copied_.size() ? nullptr : "copies are lost";
}

}  // namespace rekindle
