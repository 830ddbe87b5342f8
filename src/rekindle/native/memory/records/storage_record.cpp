#include "storage_record.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace rekindle {

bool StorageRecord::is_held() const noexcept {
    if (!keeper) {
        return true;
    }
    const c10::impl::PyObjectSlot& python = *keeper->pyobj_slot();
    // References to the storage that the runtime itself holds: `keeper`, and two more during a
    // transfer (the swapper's, and that of the host copy in Python). Any further reference is the
    // program's.
    const std::size_t ours = leaving || coming ? 3 : 1;
    if (python.load_pyobj() == nullptr) {
        return keeper.use_count() > ours;
    }
    // The Python storage object holds one more reference, and lives as long as the storage does.
    return keeper.use_count() > ours + 1 || !python.has_unique_reference();
}

void StorageRecord::find_version_counter(const c10::TensorImpl& reader) {
    if (!unwatched) {
        return;
    }
    unwatched = false;
    if (const auto tensor = origin.lock()) {
        version.counter = tensor->version_counter();
    } else {
        // Let `follow` choose the tensor whose version counter is read. `reader` may have another
        // counter than the value, and may later get other memory (`.data = ...`).
        follow(reader);
    }
}

void StorageRecord::follow(const c10::TensorImpl& reader) {
    const at::Tensor alias = borrowed(reader);
    const auto* view = torch::autograd::impl::get_view_autograd_meta(alias);
    const bool of_whole = view != nullptr && view->has_bw_view();
    const at::Tensor& whole = of_whole ? view->get_backward_view().base_ : alias;
    origin = weak(*whole.unsafeGetTensorImpl());
    version.counter = reader.version_counter();
    version.look();
}

bool StorageRecord::was_modified(const StoragePtr& there) {
    if (!version.rose() || shares_version_counter || !origin_is_at(there)) [[likely]] {
        return false;
    }
    shares_version_counter = is_counted_with_others();
    return !shares_version_counter;
}

void StorageRecord::stop_following(const c10::TensorImpl& tensor) {
    if (origin._unsafe_get_target() == &tensor) {
        origin = no_tensor();
        version = Version();
        unwatched = false;
    }
}

// Return true if the version counter counts writes to the storage `there`. Return false if the
// program has executed `x.data = y`, which gives the tensor other memory.
bool StorageRecord::origin_is_at(const StoragePtr& there) const {
    const auto tensor = origin.lock();
    return !tensor || !tensor->has_storage() ||
           tensor->unsafe_storage().unsafeGetStorageImpl() == there.get();
}

// Return true if the value of `other` is in other memory, and tensors with the version counter of
// this value refer to that memory.
bool StorageRecord::counts_with(const StorageRecord& other) const {
    if (other.address == nullptr || other.address == address) {
        return false;
    }
    const auto tensor = other.origin.lock();
    return is_same_counter(version.counter, other.version.counter) ||
           (tensor && is_same_counter(version.counter, tensor->version_counter()));
}

// Return true if the version counter also counts writes to other memory. Scenario: `old =
// w.detach()`, then `old.data = old.data.clone()`. Each step of an optimizer of `w` raises the
// count of `old`. It is looked for only where the count has risen.
bool StorageRecord::is_counted_with_others() const {
    const auto any = [&](Storage* each, Storage* Storage::* other) {
        while (each != nullptr && !counts_with(record_of(*each))) {
            each = each->*other;
        }
        return each != nullptr;
    };
    return any(previous, &Storage::previous) || any(next, &Storage::next);
}

void describe(StorageRecord& record, const c10::TensorImpl& tensor) {
    record.follow(tensor);
    const at::Tensor whole(record.origin.lock());
    record.parameter = whole.requires_grad() && whole.is_leaf();
}

void remember(StorageRecord& record, const c10::TensorImpl& tensor) {
    record.origin = weak(tensor);
    record.version.expected = Version::count_of(tensor.version_counter());
    record.unwatched = true;
}

void note_checksum(const StorageRecord& record) {
    if (!record.special.external()->checksum || !record.consumed()) {
        record.special.external()->checksum = checksum_of(*record.at());
    }
}

bool is_back(StorageRecord& record, const StoragePtr& storage_impl) {
    const Gathered& before = *record.special.gathered();
    if (std::cmp_not_equal(storage_impl->nbytes(), before.size)) {
        return false;
    }
    if (!record.absent && !before.unwatched) {
        return true;
    }
    if (!is_same(fingerprint_of(storage_impl), before.contents)) {
        return false;
    }
    record.absent = false;
    if (record.version.expected < 0) {
        record.version.look();
    }
    return true;
}

}  // namespace rekindle
