// What the running backward pass has unpacked and made.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../../base/types.h"

namespace rekindle {

// The ids of the storages that one backward node unpacked. While the node runs, autograd holds a
// tensor of each, which no variable of the program refers to. The caller holds the session mutex.
class UnpackedByNode final {
public:
    // Record that the backward pass with the number `pass` runs. When it was first seen to run,
    // `newest` was the newest allocation.
    void runs(int pass, std::int64_t newest) noexcept {
        if (pass != pass_) {
            pass_ = pass;
            before_ = newest;
        }
    }

    // Return true if `allocation` was made since the backward pass with the number `pass` began.
    bool made_in(int pass, std::int64_t allocation) const noexcept {
        return pass >= 0 && pass == pass_ && allocation > before_;
    }

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
    int pass_ = -1;
    std::int64_t before_ = 0;
    const void* node_ = nullptr;
    std::vector<StorageId> storages_;
};

}  // namespace rekindle
