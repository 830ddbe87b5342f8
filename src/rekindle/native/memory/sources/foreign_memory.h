// Storages whose memory may be a part of another storage.
//
// `storage[a:b]` is a storage of its own, at an address inside `storage`. So is memory that PyTorch
// did not allocate, such as a slice of a NumPy array. Memory of PyTorch's allocator never begins
// inside other memory. So ranges of addresses are compared only where foreign storages exist.
#pragma once

#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "../../torch/free_queue.h"
#include "../../torch/storage_ptr.h"

namespace rekindle {

// Range of addresses that a storage occupies. A storage without memory, or an evicted one, occupies
// none.
struct MemoryRange final {
    const char* begin = nullptr;
    const char* end = nullptr;

    static MemoryRange of(const c10::StorageImpl& storage_impl) {
        const auto* first = static_cast<const char*>(
            const_cast<c10::StorageImpl&>(storage_impl)._mutable_data_ptr_no_checks().get()
        );
        return {first, first == nullptr ? nullptr : first + storage_impl.nbytes()};
    }

    bool overlaps(const MemoryRange& other) const noexcept {
        return std::less<>()(begin, other.end) && std::less<>()(other.begin, end);
    }
};

// Return true if the memory of `storage_impl` may be a part of another storage. On a CPU, hooks the
// deleter of memory that is not.
inline bool is_foreign(c10::StorageImpl& storage_impl) noexcept {
    if (is_placeholder(storage_impl)) {
        return false;
    }
    const bool on_cpu = storage_impl.device_type() == c10::DeviceType::CPU;
    return on_cpu ? !hook_deleter(storage_impl) : !storage_impl.resizable();
}

// The foreign storages that the runtime has met. The caller holds the session mutex.
class ForeignMemory final {
public:
    bool any() const noexcept { return !parts_.empty(); }

    // Add a foreign storage. overlaps: it shares memory with another storage that is known.
    void add(c10::StorageImpl& storage_impl, bool overlaps) {
        for (Part& each : parts_) {
            if (each.storage_impl._unsafe_get_target() == &storage_impl) {
                each.overlaps = each.overlaps || overlaps;
                return;
            }
        }
        if (parts_.size() >= most_) {
            std::erase_if(parts_, [](const Part& each) { return each.storage_impl.expired(); });
            most_ = std::max<std::size_t>(64, 2 * parts_.size());
        }
        parts_.push_back({weak(storage_impl), MemoryRange::of(storage_impl), overlaps});
    }

    // Return true if a foreign storage has some of the memory in `range`, and shares it.
    bool shares(const MemoryRange& range) const noexcept {
        return std::ranges::any_of(parts_, [&](const Part& each) {
            return each.overlaps && each.range.overlaps(range);
        });
    }

    // Mark the foreign storages in `range` as sharing their memory. Return them.
    std::vector<StoragePtr> within(const MemoryRange& range) {
        std::vector<StoragePtr> found;
        for (Part& each : parts_) {
            if (!each.range.overlaps(range)) {
                continue;
            }
            if (StoragePtr storage_impl = each.storage_impl.lock()) {
                each.overlaps = true;
                found.push_back(std::move(storage_impl));
            }
        }
        return found;
    }

    void clear() noexcept { parts_.clear(); }

private:
    struct Part final {
        WeakStorage storage_impl;
        MemoryRange range;
        bool overlaps;
    };

    std::vector<Part> parts_;
    std::size_t most_ = 64;  // length of the list at which entries of freed storages are removed
};

}  // namespace rekindle
