#include "swapper.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <utility>

#include "driver.h"

namespace rekindle {

namespace {

// Largest number of swap-ins in flight before their values are needed: the next value arrives while
// the previous one is used.
constexpr std::size_t READS_AHEAD = 2;

}  // namespace

Swapper::Swapper(Driver& driver, _object* asked)
    : copies(asked), driver_(driver), engine_(driver.engine) {}

// Return true if `moves` contains a transfer of `record`.
bool Swapper::has(const Moves& moves, const StorageRecord& record) noexcept {
    return std::ranges::any_of(moves, [&](const Moving& each) { return each.record == &record; });
}

// Remove the transfer of `record`, which must be in flight, from `moves`. Return the memory that
// the transfer uses.
StoragePtr Swapper::take(Moves& moves, const StorageRecord& record) {
    const auto found =
        std::ranges::find_if(moves, [&](const Moving& each) { return each.record == &record; });
    StoragePtr storage_impl = std::move(found->storage_impl);
    moves.erase(found);
    return storage_impl;
}

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
        read_ahead();
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
    while (!leaving_.empty() && copies.ended(leaving_.front().record->id)) {
        arrive(*leaving_.front().record);
    }
    if (engine_.budget != UNLIMITED) {
        const Bytes most = engine_.budget - (engine_.memory - counted_) - nbytes;
        while (!coming_.empty() && in_flight() > most) {
            give_up(*coming_.back().record);
        }
        while (!leaving_.empty() && in_flight() > most) {
            arrive(*leaving_.front().record);
        }
    }
    if (!performing_) {
        count(in_flight());
    }
}

void Swapper::wait_for_all() {
    while (!coming_.empty()) {
        give_up(*coming_.back().record);
    }
    while (!leaving_.empty()) {
        arrive(*leaving_.front().record);
    }
}

// Return the bytes that transfers in flight occupy and that the engine treats as free.
Bytes Swapper::in_flight() const noexcept {
    Bytes nbytes = 0;
    for (const Moving& each : leaving_) {
        nbytes += each.record->resident ? 0 : each.record->nbytes;
    }
    for (const Moving& each : coming_) {
        nbytes += each.record->nbytes;
    }
    return nbytes;
}

// Let the engine count `nbytes` for transfers in flight, instead of the number of the previous
// call.
void Swapper::count(Bytes nbytes) {
    if (nbytes != counted_) {
        engine_.account(0, nbytes - counted_);
        counted_ = nbytes;
    }
}

// Pass new streams of the program to `copies`. A copy waits for the work queued on all streams, and
// later work waits for the copy.
void Swapper::tell_streams() {
    if (!driver_.device.queues()) {
        return;
    }
    driver_.device.see();
    const auto& seen = driver_.device.streams.seen();
    while (told_ < seen.size()) {
        copies.see(seen[told_++]);
    }
}

// Wait until the transfer of `record` has finished. Return the reason if it failed, else an empty
// string.
std::string Swapper::wait(const StorageRecord& record) {
    tell_streams();
    HostStore::End end = copies.wait(record.id);
    if (end.out_bytes_per_s != 0 || end.in_bytes_per_s != 0) {
        engine_.measured(end.out_bytes_per_s, end.in_bytes_per_s);
    }
    return std::move(end.why);
}

// -- out ------------------------------------------------------------------------------------------

bool Swapper::begin(StorageRecord& record) {
    const StoragePtr storage_impl = record.at();
    if (!storage_impl || std::cmp_not_equal(storage_impl->nbytes(), record.size)) {
        return false;
    }
    tell_streams();
    if (!copies.write(record.id, storage_impl)) {
        return false;
    }
    there_.insert(&record);
    leaving_.push_back({&record, storage_impl});
    record.leaving = true;
    return record.replayable || ended(record);
}

void Swapper::gone(StorageRecord& record) {
    if (record.leaving && !performing_) {
        count(in_flight());
    }
    if (there_.contains(&record) && !is_away(record)) {
        away_.insert(place_of(record.id), &record);
    }
}

void Swapper::process_pending(StorageRecord& record) {
    if (record.leaving) {
        arrive(record);
    }
}

// Wait for the swap-out of `record`, which the engine treats as finished. Undo the eviction if the
// copy failed.
void Swapper::arrive(StorageRecord& record) {
    const auto is_it = [&](const Moving& each) { return each.record == &record; };
    const StoragePtr storage_impl = std::ranges::find_if(leaving_, is_it)->storage_impl;
    if (!ended(record)) {
        not_written(record, storage_impl);
    }
}

// Handle a failed swap-out of `record`, whose value is still in `storage_impl`.
void Swapper::not_written(StorageRecord& record, const StoragePtr& storage_impl) {
    const bool gone = record.on_host && !record.resident;
    // The recipe of `record` was dropped meanwhile, so its value must stay in memory.
    if (gone && !record.replayable) {
        engine_.swap_out_failed(record);
        driver_.attach_storage(record, storage_impl);
    } else {
        engine_.copy_lost(record);
    }
}

// Wait for the swap-out of `record`. Return true if the copy on the host is complete.
bool Swapper::ended(StorageRecord& record) {
    const StoragePtr storage_impl = take(leaving_, record);
    record.leaving = false;
    const std::string why = wait(record);
    if (!why.empty()) {
        forget(record, "written: " + why);
    }
    return why.empty();
}

// -- back -----------------------------------------------------------------------------------------

StoragePtr Swapper::fetch(StorageRecord& record) {
    leave_away(record);
    wanted_ = record.id;
    if (record.leaving) {  // the swap-out has not finished, so the value is still in device memory
        const auto is_it = [&](const Moving& each) { return each.record == &record; };
        StoragePtr storage_impl = std::ranges::find_if(leaving_, is_it)->storage_impl;
        if (ended(record)) {
            return storage_impl;
        }
        not_written(record, storage_impl);
        return {};
    }
    std::string why;
    if (!has(coming_, record)) {
        wait_for(record.nbytes);
        why = read_now(record);
    }
    StoragePtr storage_impl;
    if (why.empty()) {
        storage_impl = take(coming_, record);
        why = wait(record);
    }
    if (!why.empty()) {
        forget(record, "read back: " + why);
        return {};
    }
    return storage_impl;
}

void Swapper::returned(StorageRecord& record) {
    leave_away(record);
    process_pending(record);
    if (has(coming_, record)) {
        give_up(record);
    }
}

void Swapper::discard(StorageRecord& record) {
    returned(record);
    if (there_.erase(&record) != 0) {  // otherwise the copy to the host failed
        copies.release(record.id);
    }
}

// Start to swap `record` in. Return the reason if that is impossible, else an empty string.
std::string Swapper::read(StorageRecord& record) {
    tell_streams();
    const StoragePtr storage_impl =
        allocate_storage(static_cast<std::size_t>(record.size), driver_.device.which());
    driver_.device.keep_until_read(*storage_impl);
    std::string why = copies.read(record.id, storage_impl);
    if (why.empty()) {
        coming_.push_back({&record, storage_impl});
    }
    return why;
}

// Like `read`, but if the device has no room, finish all other transfers and try again. Return the
// reason of a failure, else an empty string.
std::string Swapper::read_now(StorageRecord& record) {
    try {
        return read(record);
    } catch (const std::exception& error) {
        if (!is_device_oom(error)) {
            throw;
        }
    }
    wait_for_all();
    if (driver_.device.queues()) {
        driver_.device.empty_cache();
    }
    return read(record);
}

// Start to swap in the values that were saved just before the value swapped in last, because a
// backward pass needs them next. Use at most half of the free room, so that the next operators fit.
void Swapper::read_ahead() {
    if (!wanted_) {
        return;
    }
    auto index = static_cast<std::size_t>(place_of(*wanted_) - away_.begin());
    wanted_.reset();
    while (index > 0 && coming_.size() < READS_AHEAD) {
        StorageRecord& record = *away_[--index];
        if (record.references == 0 || has(coming_, record) || record.leaving) {
            continue;
        }
        if (engine_.budget != UNLIMITED &&
            2 * record.nbytes > engine_.budget - engine_.memory - in_flight()) {
            return;
        }
        try {
            // The error is reported when the program needs the value.
            if (!read(record).empty()) {
                return;
            }
        } catch (const std::exception& error) {
            if (!is_device_oom(error)) {
                throw;
            }
            return;  // an early swap-in must not evict anything
        }
    }
}

// Cancel the early swap-in of `record` to make room. The value stays on the host.
void Swapper::give_up(StorageRecord& record) {
    const StoragePtr storage_impl = take(coming_, record);
    // A failure is reported by the later swap-in.
    wait(record);
}

// Return the position in `away_` of the record with id `number`, or the position where it would be
// inserted.
std::vector<StorageRecord*>::iterator Swapper::place_of(StorageId number) {
    return std::ranges::lower_bound(away_, number, {}, [](const StorageRecord* each) {
        return each->id;
    });
}

// Return true if `record` is evicted and has a copy on the host.
bool Swapper::is_away(const StorageRecord& record) {
    const auto place = place_of(record.id);
    return place != away_.end() && *place == &record;
}

// Remove `record` from `away_`.
void Swapper::leave_away(const StorageRecord& record) {
    if (is_away(record)) {
        away_.erase(place_of(record.id));
    }
}

// -- failures -------------------------------------------------------------------------------------

// Forget the host copy of `record`, which could not be written or read because of `why`.
void Swapper::forget(StorageRecord& record, const std::string& why) {
    leave_away(record);
    there_.erase(&record);
    complaint_due = true;
    copies.complain_of(record.nbytes, record.site(), why);
    copies.release(record.id);
}

const char* Swapper::fault() const {
    std::size_t copied = 0;
    std::size_t away = 0;
    for (Storage* each = engine_.first_storage(); each != nullptr; each = each->next) {
        const auto& record = record_of(*each);
        if (record.on_host != there_.contains(&record)) {
            return "a copy is not where the engine knows it";
        }
        if (record.leaving && !record.on_host) {
            return "what is on its way to the host has no copy";
        }
        const bool gone = record.on_host && !record.resident;
        if (gone != (std::ranges::find(away_, &record) != away_.end())) {
            return "what can come back is not known";
        }
        copied += record.on_host ? 1 : 0;
        away += gone ? 1 : 0;
    }
    return copied == there_.size() && away == away_.size() ? nullptr : "copies are lost";
}

}  // namespace rekindle
