#include "storage_record.h"

#include <torch/csrc/autograd/variable.h>

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

bool StorageRecord::origin_is_at(const StoragePtr& there) const {
    const auto tensor = origin.lock();
    return !tensor || !tensor->has_storage() ||
           tensor->unsafe_storage().unsafeGetStorageImpl() == there.get();
}

}  // namespace rekindle
