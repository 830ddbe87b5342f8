#include "resizes.h"

#include <utility>

namespace rekindle {

bool Resizes::about_to_resize(c10::StorageImpl& storage_impl, Bytes nbytes, std::int64_t newest) {
    room_.bring_back(storage_impl);
    const AddressEntry* found = registry_.find(storage_impl);
    StorageRecord* known =
        found != nullptr ? &sources_.known_at(*found, storage_impl) : emptied_at(storage_impl);
    if (known == nullptr) {
        return false;
    }
    StorageRecord& record = *known;
    const Ref<Storage> kept(known);
    events_.about_to_write(record);
    const Bytes more = nbytes - record.size;
    if (more < 0 && !record.replayable && record.consumed()) {
        const bool leaves = (newest >= 0 && !registry_.device.is_capturing()) || record.absent;
        if (!leaves || !sources_.gathered.leave(record, newest)) {
            sources_.forget(record);
        }
    } else if (more > engine_.budget - engine_.memory && registry_.devices.counts(storage_impl)) {
        room_.make_room(more, "resize_");
    }
    // Recipes may need the contents before the resize, so register the resize as a write (R3,
    // in-place writes).
    const bool written = record.replayable && more != 0;
    resizing_ = Ref<Storage>(written ? &storages_.record_external_write(record) : &record);
    return true;
}

void Resizes::has_been_resized() {
    if (const Ref<Storage> record = std::exchange(resizing_, {}); record) {
        registry_.drain();
        registry_.device.streams.note(record->id, registry_.device.streams.unknown());
        frees_.resized(record_of(*record));
        if (record_of(*record).size == 0) {
            emptied_.push_back(record);
        }
    }
}

// Return the record of `storage_impl`, which the program has resized to zero bytes, or null.
StorageRecord* Resizes::emptied_at(const c10::StorageImpl& storage_impl) {
    StorageRecord* found = nullptr;
    std::erase_if(emptied_, [&](const Ref<Storage>& each) {
        StorageRecord& record = record_of(*each);
        const StoragePtr there = record.at();
        found = there.get() == &storage_impl ? &record : found;
        return !there || there.get() == &storage_impl;
    });
    return found;
}

}  // namespace rekindle
