// Prepares the operands of an operator: restores evicted ones, looks up their storage records, and
// protects their contents from writes.
#include <c10/core/GradMode.h>

#include <algorithm>

#include "../memory/room/swapper.h"
#include "../memory/sources/gathered.h"
#include "operation.h"

namespace rekindle {

void Operation::note_read(StorageList& read) const {
    for (const c10::TensorImpl* tensor : parsed_.tensors) {
        read.push_back(tensor->unsafe_storage().unsafeGetStorageImpl());
    }
}

// Run the operator. Before, restore the inputs that were evicted while variables of the program
// refer to them.
void Operation::run_whole() {
    if (session_.registry.placeholders != 0 && !reads_only_shape(facts_, 0)) [[unlikely]] {
        for (const c10::TensorImpl* tensor : parsed_.tensors) {
            retry_evicting_held([&] {
                session_.room.bring_back(*tensor->unsafe_storage().unsafeGetStorageImpl());
            });
        }
    }
    run_with_inputs();
}

// Look up the storage records of all tensor arguments, and note the version counters that recipes
// need.
void Operation::know_inputs() {
    inputs_.clear();
    for (const c10::TensorImpl* tensor : parsed_.tensors) {
        StorageRecord* record = session_.sources.find_or_register(*tensor);
        inputs_.push_back(Ref<Storage>(record));
        if (record == nullptr) {  // a tensor without memory has no record
            recording_ = false;
            continue;
        }
        const auto position = static_cast<std::uint32_t>(inputs_.size() - 1);
        if (record->special.is_gathered() && recording_ && !is_written(position)) [[unlikely]] {
            record = &session_.sources.settle(*record, *tensor);
            inputs_.back() = Ref<Storage>(record);
        }
        // Get the version counter now. After the operator has run, the tensor may be destroyed.
        record->find_version_counter(*tensor);
        foreign_ = foreign_ || record->special.is_external();
    }
    if (foreign_) [[unlikely]] {
        // A new storage that shares memory with an earlier input has changed that input's record.
        for (Ref<Storage>& each : inputs_) {
            if (each) {
                each = Ref<Storage>(&current(record_of(*each)));
            }
        }
    }
    const bool ordered = session_.device.streams.are_several();
    for (std::uint32_t i = 0; i < inputs_.size(); ++i) {
        if (inputs_[i] && input(i)->flags != 0) [[unlikely]] {
            resolve_content_flags(i);
        }
        if (ordered && inputs_[i]) [[unlikely]] {
            const c10::TensorImpl& tensor = *parsed_.tensors[i];
            order(i, *tensor.unsafe_storage().unsafeGetStorageImpl(), *input(i));
        }
    }
}

// Exclude the operator's inputs from eviction as long as the program holds them.
void Operation::keep_inputs_there() {
    for (const Ref<Storage>& each : inputs_) {
        if (each) {
            session_.held.pin_while_held(record_of(*each));
        }
    }
}

// Return true if the operator writes the tensor argument at `position`.
bool Operation::is_written(std::uint32_t position) const noexcept {
    return std::ranges::binary_search(parsed_.written, position);
}

// Handle the input at `position` if operators have not written all of it since `empty` or `zeros`
// made it: other code may have written it unseen, so recomputing it could give other contents (R4,
// sources).
void Operation::resolve_content_flags(std::uint32_t position) {
    StorageRecord& record = *input(position);
    const bool reads_zeros = (record.flags & ZEROED) != 0 && !is_written(position);
    if (reads_zeros || reads_unwritten(position)) {
        session_.room.seal(record);
        record.clear_flags();
    } else {
        record.flags &= UNWRITTEN;
    }
}

// Return true if the operator reads bytes of the argument at `position` that no operator has
// written since `empty` made the storage.
bool Operation::reads_unwritten(std::uint32_t position) {
    const StorageRecord& record = *input(position);
    const bool overwrites = is_written(position) && facts_.has(Traits::OVERWRITING);
    if ((record.flags & UNWRITTEN) == 0 || overwrites) {
        return false;
    }
    const c10::TensorImpl& tensor = *parsed_.tensors[position];
    UnwrittenBytes* unwritten = record.special.unwritten();
    return unwritten == nullptr || !is_plain(tensor) ||
           (unwritten->overlaps(ByteRegion::of(tensor)) && !copies_within(*unwritten));
}

// Return true if the operator copies a part of a storage to another part of it, so that
// `UnwrittenBytes::copy` describes the result.
bool Operation::copies_within(UnwrittenBytes& unwritten) {
    if (!facts_.copies || inputs_.size() != 2 || inputs_[0].get() != inputs_[1].get()) {
        return false;
    }
    const c10::TensorImpl& target = *parsed_.tensors[0];
    const c10::TensorImpl& source = *parsed_.tensors[1];
    return target.sizes() == source.sizes() && target.strides() == source.strides() &&
           target.dtype() == source.dtype() && is_plain(target) && is_plain(source) &&
           unwritten.can_copy(ByteRegion::of(target), ByteRegion::of(source));
}

// Return true if the operator overwrites its first argument, which `empty` made and of which no
// operator has written a part.
bool Operation::is_first_write() {
    return facts_.has(Traits::OVERWRITING) && inputs_[0] && (input(0)->flags & UNWRITTEN) != 0 &&
           input(0)->special.unwritten() == nullptr;
}

// Note which bytes of the argument at `position` the operator has written, if `empty` made the
// storage. Return false if the value must not be recomputed: the unwritten rest cannot be
// described, or other code may have written it.
bool Operation::note_written_bytes(std::uint32_t position) {
    StorageRecord& record = *input(position);
    if ((record.flags & UNWRITTEN) == 0 || !facts_.has(Traits::OVERWRITING)) [[likely]] {
        return true;
    }
    const c10::TensorImpl& tensor = *parsed_.tensors[position];
    const bool whole = tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() &&
                       tensor.numel() * static_cast<Bytes>(tensor.itemsize()) == record.size;
    if (whole) {
        record.clear_flags();
        return true;
    }
    // Code that has the address may write the memory again, before operators have written the rest.
    if (!is_plain(tensor) || record.read_unseen) {
        return false;
    }
    UnwrittenBytes* known = record.special.unwritten();
    UnwrittenBytes& unwritten =
        known != nullptr ? *known : record.special.make_unwritten(record.size);
    const ByteRegion target = ByteRegion::of(tensor);
    const bool possible = copies_within(unwritten)
                              ? unwritten.copy(target, ByteRegion::of(*parsed_.tensors[1]))
                              : unwritten.write(target);
    if (unwritten.none()) {
        record.clear_flags();
    }
    return possible;
}

// Pin those inputs, such as masks and indices, that decide the shape of a result: they are never
// recomputed (R8, routing).
void Operation::keep_indices() {
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
        const auto dtype = c10::typeMetaToScalarType(parsed_.tensors[i]->dtype());
        StorageRecord* record = input(i);
        if (record != nullptr && !c10::isFloatingType(dtype) && record->replayable &&
            !record->pinned) {
            session_.room.pin(*record);
        }
    }
}

// An operator of another library may raise the version of a tensor before it writes the tensor, as
// operators of `torch.library.custom_op` do. PyTorch's own operators do so afterwards. The memory
// has its old contents until then, so values can still be recomputed from it.
void Operation::expect_raised_versions() {
    if (!call_.op.hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView)) {
        return;
    }
    for (const std::uint32_t position : parsed_.written) {
        const c10::TensorImpl& tensor = *parsed_.tensors[position];
        StorageRecord* record = session_.registry.find_record(tensor);
        if (record == nullptr) {
            continue;
        }
        record->find_version_counter(tensor);
        Version& version = record->version;
        const auto raised = std::ranges::count_if(parsed_.written, [&](std::uint32_t each) {
            return is_same_counter(version.counter, parsed_.tensors[each]->version_counter());
        });
        if (version.moved() && version.now() - version.expected == raised) {
            version.look();
        }
    }
}

// Before the operator overwrites sources (values without a recipe), recompute and pin the values
// whose recipes need the old contents (R4, sources). This may take the recipe of another value that
// the operator overwrites, so look again until nothing is left to save.
void Operation::save_what_is_overwritten() {
    if (rare_) [[unlikely]] {
        rare_->fixed.clear();
    }
    bool saved = false;
    do {
        saved = false;
        for (const std::uint32_t position : parsed_.written) {
            StorageRecord* record = input(position);
            if (record == nullptr) {
                continue;
            }
            session_.events.about_to_write(*record);
            // Skip a parameter that FSDP has freed (`absent`): FSDP gathers it again by writing to
            // its storage. Its contents are compared later, when a recipe reads them.
            if (!record->replayable && record->consumed() && !record->absent) {
                rare().fixed.push_back(record);
                session_.sources.forget(*record);
                saved = true;
            } else if (session_.in_progress.awaits(*record)) [[unlikely]] {
                rare().fixed.push_back(record);
            }
            if (record->special.is_external() && session_.sources.save_overlapping(*record))
                [[unlikely]] {
                saved = true;
            }
        }
    } while (saved && parsed_.written.size() > 1);
}

// Make private copies of those inputs that code outside PyTorch may write, and let the recipe read
// the copies. Return false if the copies would take more bytes than keeping the results in memory.
// Weights are not copied, but get a checksum (R4, sources).
bool Operation::take_private_inputs() {
    if (session_.device.queues()) {
        // the device may still be writing the buffer, so a copy could have wrong contents
        return false;
    }
    c10::SmallVector<StorageRecord*, 2> copied;
    Bytes more = 0;
    Bytes kept = needed_;
    for (std::uint32_t i = 0; i < inputs_.size(); ++i) {
        StorageRecord& record = *input(i);
        const bool written = is_written(i);
        if (record.special.is_external() && written) {
            return false;
        }
        kept += written ? record.nbytes : 0;
        if (!record.special.is_external() || is_weight(*parsed_.tensors[i]) ||
            std::ranges::find(copied, &record) != copied.end()) {
            continue;
        }
        copied.push_back(&record);
        more += copy_still(record) == nullptr ? record.nbytes : 0;
    }
    if (more > kept) {
        return false;
    }
    for (std::uint32_t i = 0; i < inputs_.size(); ++i) {
        StorageRecord& record = *input(i);
        if (!record.special.is_external()) {
            continue;
        }
        if (is_weight(*parsed_.tensors[i])) {
            note_checksum(record);
            continue;
        }
        StorageRecord* copy = copy_still(record);
        inputs_[i] = Ref<Storage>(
            copy != nullptr ? copy
                            : &session_.sources.copy_now(record, rare().copies.emplace_back())
        );
    }
    return true;
}

// Call `visit` for each input that is a source (a value without a recipe), if the call gets a
// recipe.
template <class F>
void Operation::each_source(F&& visit) {
    if (!recording_) {
        return;
    }
    for (const Ref<Storage>& each : inputs_) {
        if (each->pinned || !each->replayable) [[unlikely]] {
            visit(each);
        }
    }
}

// Hold the memory of the sources while the operator runs, because the recipe needs them. The
// program may free its last reference meanwhile, or the kernel may drop it with its arguments.
void Operation::hold_sources() {
    each_source([&](const Ref<Storage>& each) {
        sources_.push_back({each, record_of(*each).at()});
    });
}

// Give the runtime a reference to each source, now that a recipe is about to read it. An input may
// have lost its own recipe while the operator ran. Record no recipe if the memory of a source is
// gone.
void Operation::own_sources() {
    each_source([&](const Ref<Storage>& each) {
        StorageRecord& record = record_of(*each);
        if (!record.keeper) {
            record.own();
            sources_.push_back({each, {}});
            recording_ = recording_ && record.keeper;
        }
    });
}

// Release the memory of the sources. The runtime keeps a reference to what recipes read.
void Operation::let_go_of_sources() {
    for (Source& source : sources_) {
        source.memory.reset();
    }
    for (const Source& source : sources_) {
        session_.frees.disown(record_of(*source.record));
    }
}

}  // namespace rekindle
