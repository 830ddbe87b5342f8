// Storages of the program whose address left PyTorch before any operator of the budget read them.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

namespace rekindle {

// Such storages have no record yet. Once they get one, other code may read, or also write, their
// memory. The caller holds the session mutex.
class ExposedStorages final {
public:
    // Remember `storage_impl`. written: other code may write it as well.
    void add(c10::StorageImpl& storage_impl, bool written) {
        std::erase_if(entries_, [](const Entry& each) { return each.storage_impl.expired(); });
        const auto found = find(storage_impl);
        if (found == entries_.end()) {
            const auto strong = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(&storage_impl);
            entries_.push_back({c10::weak_intrusive_ptr<c10::StorageImpl>(strong), written});
        } else {
            found->written = found->written || written;
        }
    }

    // Forget `storage_impl`. Return none if it was not remembered, else true if it may be written.
    std::optional<bool> take(const c10::StorageImpl& storage_impl) {
        const auto found = find(storage_impl);
        if (found == entries_.end()) [[likely]] {
            return {};
        }
        const bool written = found->written;
        entries_.erase(found);
        return written;
    }

private:
    struct Entry final {
        c10::weak_intrusive_ptr<c10::StorageImpl> storage_impl;
        bool written;
    };

    // The storage that `add` remembers stays a distinct address while there is a weak reference.
    std::vector<Entry>::iterator find(const c10::StorageImpl& storage_impl) {
        return std::ranges::find_if(entries_, [&](const Entry& each) {
            return each.storage_impl._unsafe_get_target() == &storage_impl;
        });
    }

    std::vector<Entry> entries_;
};

}  // namespace rekindle
