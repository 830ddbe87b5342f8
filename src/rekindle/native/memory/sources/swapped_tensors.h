// Tensors that `torch.utils.swap_tensors` exchanges: it refuses tensors with weak references.
#pragma once

#include <c10/core/TensorImpl.h>

#include <utility>
#include <vector>

#include "../records/storage_record.h"
#include "../room/frees.h"

namespace rekindle {

// The tensors to which one budget has dropped its weak references for a while. The caller holds the
// session mutex.
class SwappedTensors final {
public:
    explicit SwappedTensors(Frees& frees) : frees_(frees) {}

    // Drop the runtime's weak references to `tensor` until `resume`.
    void suspend(const c10::TensorImpl& tensor) {
        frees_.process_pending();
        frees_.registry.observers.module_tensors.remove(tensor);
        for (Storage* each = frees_.engine.first_storage(); each != nullptr; each = each->next) {
            StorageRecord& record = record_of(*each);
            if (record.origin.lock().get() == &tensor) {
                record.origin = no_tensor();
                suspended_.emplace_back(each, const_cast<c10::TensorImpl*>(&tensor));
            }
        }
    }

    // The contents of two tensors were exchanged. Let each record follow the same tensor object as
    // before.
    void resume() {
        for (auto& [storage, tensor] : std::exchange(suspended_, {})) {
            record_of(*storage).origin = weak(*tensor);
        }
    }

private:
    Frees& frees_;
    // records without their weak reference to a tensor (`StorageRecord::origin`), each with that
    // tensor
    std::vector<std::pair<Ref<Storage>, c10::TensorImpl*>> suspended_;
};

}  // namespace rekindle
