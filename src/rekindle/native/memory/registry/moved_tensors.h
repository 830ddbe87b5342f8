// Tensors that autograd saved, and to which the program then gave other memory (`tensor.data =
// ...`).
//
// PyTorch's autograd refers to a saved tensor, so the backward pass reads the memory that the
// tensor has by then. A handle refers to the memory that was saved, and has only a weak reference
// to the tensor. If the program's variable dies before the backward pass, this list has the
// tensor's last memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../../torch/geometry.h"
#include "../../torch/storage_ptr.h"
#include "../records/storage_record.h"

namespace rekindle {

// The last memory of saved tensors whose memory was replaced. A member needs the session mutex,
// unless its comment says otherwise.
class MovedTensors final {
public:
    // Return true if there is such a tensor. Needs no mutex.
    bool any() const noexcept { return any_.load(std::memory_order_acquire); }

    bool has(const c10::TensorImpl& tensor) const { return moved_.contains(&tensor); }

    // Note that `tensor` has other memory now. Handles of autograd may refer to it by `record`, or,
    // if operators were only counted, by the storage `counted`. One of both is null.
    void note(const c10::TensorImpl& tensor, StorageRecord* record, c10::StorageImpl* counted) {
        Moved& moved = moved_[&tensor];
        if (!moved.now.defined()) {
            moved.tensor = weak(tensor);
        }
        moved.now = alias_of(tensor);
        if (record != nullptr) {
            moved.records.emplace_back(record);
        }
        if (counted != nullptr) {
            moved.counted.push_back(weak(*counted));
        }
        any_.store(true, std::memory_order_release);
    }

    // Return the memory that `tensor`, which is dead, had at the end. Undefined if it was not
    // replaced.
    at::Tensor find(const c10::TensorImpl* tensor) const {
        const auto found = moved_.find(tensor);
        return found == moved_.end() ? at::Tensor() : found->second.now;
    }

    // Drop the tensors to which no handle of autograd refers any more.
    void drop_unreferenced() {
        std::erase_if(moved_, [](const auto& each) { return !each.second.is_referenced(); });
        any_.store(!moved_.empty(), std::memory_order_release);
    }

    void clear() noexcept { moved_.clear(); }

private:
    struct Moved final {
        WeakTensor tensor = no_tensor();  // keeps the tensor's address unique
        at::Tensor now;
        std::vector<Ref<Storage>> records;
        std::vector<WeakStorage> counted;

        bool is_referenced() const {
            const auto in_record = [](const Ref<Storage>& each) {
                return current(record_of(*each)).references != 0;
            };
            const auto alive = [](const WeakStorage& each) { return !each.expired(); };
            return std::ranges::any_of(records, in_record) || std::ranges::any_of(counted, alive);
        }
    };

    std::unordered_map<const c10::TensorImpl*, Moved> moved_;
    std::atomic<bool> any_{false};
};

}  // namespace rekindle
