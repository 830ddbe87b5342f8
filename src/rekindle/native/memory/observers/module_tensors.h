// Parameters and buffers that were registered with modules inside the budget, for memory snapshots.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "../../torch/storage_ptr.h"

namespace rekindle {

// A parameter or buffer registered with a module inside the budget.
struct ModuleTensor final {
    WeakTensor tensor;
    bool parameter;
};

// Tensors registered with modules. Entries of destroyed tensors are removed whenever the list has
// doubled in length. The caller holds the session mutex.
class ModuleTensors final {
public:
    void add(WeakTensor tensor, bool parameter) {
        if (tensors_.size() >= most_) {
            std::erase_if(tensors_, [](const ModuleTensor& each) { return each.tensor.expired(); });
            most_ = std::max<std::size_t>(64, 2 * tensors_.size());
        }
        tensors_.push_back({std::move(tensor), parameter});
    }

    // Forget `tensor`, because `torch.utils.swap_tensors` refuses tensors to which a weak reference
    // exists.
    void remove(const c10::TensorImpl& tensor) {
        std::erase_if(tensors_, [&](const ModuleTensor& each) {
            return each.tensor.lock().get() == &tensor;
        });
    }

    // Call `visit(tensor, parameter)` for each registered tensor that is alive.
    template <class F>
    void each(F&& visit) const {
        for (const ModuleTensor& each : tensors_) {
            if (const at::Tensor tensor(each.tensor.lock()); tensor.defined()) {
                visit(tensor, each.parameter);
            }
        }
    }

    std::size_t nbytes() const noexcept { return tensors_.capacity() * sizeof(ModuleTensor); }

private:
    std::vector<ModuleTensor> tensors_;
    std::size_t most_ = 64;  // length of the list at which entries of destroyed tensors are removed
};

}  // namespace rekindle
