#include "swapper.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <utility>

#include "driver.h"

namespace rekindle {

namespace {

// Number of reads in flight ahead of need: one arrives while the previous value is used.
constexpr std::size_t READS_AHEAD = 2;

}  // namespace

Swapper::Swapper(Driver& driver, _object* asked)
    : copies(asked), driver_(driver), engine_(driver.engine) {}

// Return true if a transfer of `record` is among `moves`.
bool Swapper::has(const Moves& moves, const StorageRecord& record) noexcept {
    return std::ranges::any_of(moves, [&](const Moving& each) { return each.record == &record; });
}

// Remove the transfer of `record`, which must be in flight, and return its memory.
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

// Return the bytes in memory that the engine treats as free.
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

// Let the engine count `nbytes` for transfers in flight, instead of the previous number.
void Swapper::count(Bytes nbytes) {
    if (nbytes != counted_) {
        engine_.account(0, nbytes - counted_);
        counted_ = nbytes;
    }
}

// Announce new streams of the program. A copy waits for the work queued on all of them, and later
// work waits for the copy.
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

// Wait for a transfer. Return why it failed, or an empty string.
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

// Wait for the write of `record`, which the engine treats as finished.
void Swapper::arrive(StorageRecord& record) {
    const auto is_it = [&](const Moving& each) { return each.record == &record; };
    const StoragePtr storage_impl = std::ranges::find_if(leaving_, is_it)->storage_impl;
    if (!ended(record)) {
        not_written(record, storage_impl);
    }
}

// Handle a failed write of `record`, whose value is still in `storage_impl`.
void Swapper::not_written(StorageRecord& record, const StoragePtr& storage_impl) {
    const bool gone = record.on_host && !record.resident;
    // Its recipe was dropped meanwhile, so it must stay resident.
    if (gone && !record.replayable) {
        engine_.swap_out_failed(record);
        driver_.attach_storage(record, storage_impl);
    } else {
        engine_.copy_lost(record);
    }
}

// Wait for the write of `record`. Return true if the copy is good.
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
    if (record.leaving) {  // its memory is still here
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
    if (there_.erase(&record) != 0) {  // otherwise it never arrived
        copies.release(record.id);
    }
}

// Start to read the copy of `record`. Return why that is impossible, or an empty string.
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

// Start to read the copy, after finishing all other transfers if the device has no room.
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

// Start to read the values that were saved just before the one swapped in last. At most half of the
// free room is used, so that the next operators fit.
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
            // The error is reported when the value is asked for.
            if (!read(record).empty()) {
                return;
            }
        } catch (const std::exception& error) {
            if (!is_device_oom(error)) {
                throw;
            }
            return;  // an early read must not evict anything
        }
    }
}

// Cancel the early read of `record` to make room. It will be read again.
void Swapper::give_up(StorageRecord& record) {
    const StoragePtr storage_impl = take(coming_, record);
    // A failure is reported by the later read.
    wait(record);
}

// Return the position of id `number` in `away_`, or the position where it belongs.
std::vector<StorageRecord*>::iterator Swapper::place_of(StorageId number) {
    return std::ranges::lower_bound(away_, number, {}, [](const StorageRecord* each) {
        return each->id;
    });
}

// Return true if `record` is in `away_`: evicted, with a copy.
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

// Forget the copy of `record`, which could not be written or read.
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
