// The PyTorch side of an engine storage: its `StorageImpl`, and the version counter that reveals
// writes.
//
// `StorageRecord` derives from the engine's `Storage`. The driver keeps all records in a slab and
// finds them by the address of their memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "../base/types.h"
#include "../engine/graph.h"
#include "../ops/facts.h"
#include "../torch/storage_ptr.h"

namespace rekindle {

// Extra state of a storage whose memory other code than PyTorch may write without notice (R4,
// sources). Examples are NumPy arrays, memory shared with another process, and buffers that a data
// loader fills.
struct ExternalMemory final {
    // Private copy of the contents at the last check. Recipes read the copy instead of the memory.
    Ref<Storage> copy;
    // Checksum of a weight, taken when recipes began to read it.
    std::optional<std::uint64_t> checksum;
};

struct StorageRecord final : Storage {
    StorageRecord(Graph& graph, StorageId number, Bytes counted)
        : Storage(graph, number, counted) {}

    // Bytes of the storage on any device. (The budget counts only memory on its own device.)
    Bytes size = 0;
    const void* address = nullptr;  // key in the address table; null without memory
    // Our strong reference to the storage. Null if the program alone keeps the memory, or if the
    // value is evicted.
    StoragePtr keeper;
    // Weak pointer to the storage, which we or the program keep alive.
    WeakStorage storage_impl = no_storage();
    // Weak pointer to a tensor of the program that has the version counter of `version`.
    WeakTensor origin = no_tensor();
    Version version;
    const Facts* maker = nullptr;  // operator that made the value; null: first seen as an argument
    Ref<Storage> successor;        // set when a later version has replaced this value in its memory
    // Links of the driver's list of records that the program may hold.
    StorageRecord* held_before = nullptr;
    StorageRecord* held_after = nullptr;
    // Length of the chain of recipes from the nearest source to this value, as `prune_history`
    // counts it.
    std::int32_t depth = 0;
    std::uint16_t chain = 0;     // length of that chain for values made with grad mode off
    std::uint8_t flags : 3 = 0;  // properties of the content (`ops/facts.h`)
    // Linked in the driver's list of records that the program may hold.
    bool maybe_held : 1 = false;
    bool parameter : 1 = false;    // a leaf that requires a gradient
    bool untracked : 1 = false;    // its storage has no deleter hook, which would report the free
    bool returnable : 1 = false;   // floating-point value that only operators read
    bool leaving : 1 = false;      // a copy to the host is in flight
    bool placeholder : 1 = false;  // evicted while the program holds it: its storage is empty
    // Its version counter also counts writes to other memory.
    bool shares_version_counter : 1 = false;
    bool unwatched : 1 = false;    // its version counter was not read yet
    bool read_unseen : 1 = false;  // code may read its memory without holding a reference
    std::unique_ptr<ExternalMemory> external;  // null: only PyTorch writes this memory

    const char* site() const noexcept { return maker == nullptr ? "source" : maker->name.c_str(); }

    // Return the storage of a resident value.
    StoragePtr at() const { return keeper ? keeper : storage_impl.lock(); }

    // Return true if the program holds a reference to the storage, in addition to the runtime's.
    bool is_held() const noexcept;
    // Start to check for writes: a recipe or autograd is about to read this value through the
    // tensor `reader`.
    void find_version_counter(const c10::TensorImpl& reader);
    // Take the version counter of `reader` as the one that reports writes to this value.
    void follow(const c10::TensorImpl& reader);
    // Return true if the version counter counts writes to the storage `there`. Return false after
    // `x.data = y`.
    bool origin_is_at(const StoragePtr& there) const;
};

inline StorageRecord& record_of(Storage& storage) noexcept {
    return static_cast<StorageRecord&>(storage);
}

// Return the record whose value now lives in the memory of `record`, after all in-place writes.
inline StorageRecord& current(StorageRecord& record) noexcept {
    StorageRecord* found = &record;
    while (found->successor) {
        found = static_cast<StorageRecord*>(found->successor.get());
    }
    return *found;
}

}  // namespace rekindle
