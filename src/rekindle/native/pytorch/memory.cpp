#include "memory.h"

namespace rekindle {

bool Record::is_held() const noexcept {
    if (!owned) {
        return true;
    }
    const c10::impl::PyObjectSlot& python = *owned->pyobj_slot();
    if (python.load_pyobj() == nullptr) {
        return owned.use_count() > 1;
    }
    // The object of Python's refers to it as well, and lives as long as it does.
    return owned.use_count() > 2 || !python.has_unique_reference();
}

bool Record::origin_is_at(const Home& there) const {
    const auto tensor = origin.lock();
    return !tensor || !tensor->has_storage() ||
           tensor->unsafe_storage().unsafeGetStorageImpl() == there.get();
}

}  // namespace rekindle
