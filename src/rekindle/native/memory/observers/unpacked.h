// The saved values that the running backward node has unpacked.
#pragma once

#include <algorithm>
#include <vector>

#include "../../base/types.h"

namespace rekindle {

// The ids of the storages that one backward node unpacked. While the node runs, autograd holds a
// tensor of each, which no variable of the program refers to. The caller holds the session mutex.
class UnpackedByNode final {
public:
    // Record that the backward node `node` unpacked a value in `storage`. `node` serves only to
    // recognize the next node, and is not read.
    void add(const void* node, StorageId storage) {
        if (node != node_) {
            storages_.clear();
            node_ = node;
        }
        if (node != nullptr) {
            storages_.push_back(storage);
        }
    }

    // Return true if the backward node `node` unpacked a value in `storage`.
    bool has(const void* node, StorageId storage) const noexcept {
        return node != nullptr && node == node_ &&
               std::ranges::find(storages_, storage) != storages_.end();
    }

private:
    const void* node_ = nullptr;
    std::vector<StorageId> storages_;
};

}  // namespace rekindle
