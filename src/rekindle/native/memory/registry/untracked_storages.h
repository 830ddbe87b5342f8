// Storages without Rekindle's deleter hook, so that nothing reports when PyTorch frees them: those
// on a device, and those of other allocators than PyTorch's.
//
// The registry polls weak pointers to them. Most freed storages were made recently, so polling the
// youngest suffices where polling is frequent.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "../../torch/storage_ptr.h"

namespace rekindle {

// A storage without our deleter hook, and the address of its memory.
struct UntrackedStorage final {
    const void* address;
    WeakStorage storage_impl;
};

// List of storages without a deleter hook, which must be polled; the one seen last is at the end.
// The caller holds the session mutex.
class UntrackedStorages final {
public:
    void add(const void* address, WeakStorage storage_impl) {
        storages_.push_back({address, std::move(storage_impl)});
    }

    // Return true if it is time to poll all storages, because many were added since the last
    // complete poll.
    bool are_due() const noexcept { return storages_.size() > due_at_; }

    // Remove the storages that PyTorch has freed, and call `freed(storage)` for each of them. If
    // `youngest`, poll only the storages added last.
    template <class F>
    void poll(bool youngest, F&& freed) {
        const std::size_t n = storages_.size();
        const std::size_t first = youngest && n > YOUNGEST ? n - YOUNGEST : 0;
        const auto dead = std::remove_if(
            storages_.begin() + static_cast<std::ptrdiff_t>(first),
            storages_.end(),
            [&](const UntrackedStorage& each) {
                if (!each.storage_impl.expired()) {
                    return false;
                }
                freed(each);
                return true;
            }
        );
        storages_.erase(dead, storages_.end());
        if (first == 0) {
            due_at_ = storages_.size() + std::max(YOUNGEST, storages_.size() / 2);
        }
    }

    // Call `visit(storage)` for each storage in the list that is alive.
    template <class F>
    void each(F&& visit) const {
        for (const UntrackedStorage& each : storages_) {
            if (const StoragePtr storage_impl = each.storage_impl.lock()) {
                visit(*storage_impl);
            }
        }
    }

    void clear() noexcept { storages_.clear(); }

private:
    // Number of storages to poll if only the most recent ones are polled.
    static constexpr std::size_t YOUNGEST = 64;

    std::vector<UntrackedStorage> storages_;
    std::size_t due_at_ = YOUNGEST;  // length of the list at which all storages are polled again
};

}  // namespace rekindle
