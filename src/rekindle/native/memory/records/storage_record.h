// The PyTorch side of an engine storage: its `StorageImpl`, and the version counter that shows
// writes by the program.
//
// `StorageRecord` derives from the engine's `Storage`. The registry keeps all records in a slab and
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
#include <utility>

#include "../../base/types.h"
#include "../../engine/graph.h"
#include "../../ops/facts.h"
#include "../../torch/fingerprint.h"
#include "../../torch/storage_ptr.h"
#include "unwritten_bytes.h"

namespace rekindle {

// Extra state of a storage whose memory other code than PyTorch may write without notice (R4,
// sources). Examples are NumPy arrays, memory shared with another process, and buffers that a data
// loader fills.
struct ExternalMemory final {
    // Private copy of the external memory, made at the last check. Recipes read the copy, so that a
    // later write to the external memory does not change recomputed values.
    Ref<Storage> copy;
    // Checksum of a weight, taken when recipes began to read the weight.
    std::optional<std::uint64_t> checksum;
};

// State of a parameter that FSDP frees and gathers again while recipes read it
// (`memory/sources/gathered.h`).
struct Gathered final {
    Bytes size;            // bytes of the parameter's storage while FSDP has gathered it
    Fingerprint contents;  // fingerprint of the contents that the recipes read
    // The budget has ended, so the runtime does not see later writes to the storage.
    bool unwatched = false;
};

// State of a storage that few storages need. It is kept outside of the record, so that records stay
// small.
class SpecialMemory final {
public:
    // Return the state of external memory; null if only PyTorch writes this memory.
    ExternalMemory* external() const noexcept {
        if (!parts_) [[likely]] {
            return nullptr;
        }
        return parts_->external ? &*parts_->external : nullptr;
    }

    // Return the state of a gathered parameter; null unless FSDP has freed it while recipes read
    // it.
    Gathered* gathered() const noexcept {
        if (!parts_) [[likely]] {
            return nullptr;
        }
        return parts_->gathered ? &*parts_->gathered : nullptr;
    }

    // Return which bytes of the storage are unwritten. Null if all of them are, or none.
    UnwrittenBytes* unwritten() const noexcept {
        return parts_ && parts_->unwritten ? &*parts_->unwritten : nullptr;
    }

    bool is_external() const noexcept { return external() != nullptr; }

    bool is_gathered() const noexcept { return gathered() != nullptr; }

    void make_external() { parts().external.emplace(); }

    void make_gathered(Gathered state) { parts().gathered = std::move(state); }

    UnwrittenBytes& make_unwritten(Bytes nbytes) { return parts().unwritten.emplace(nbytes); }

    void drop_unwritten() noexcept {
        if (parts_) {
            parts_->unwritten.reset();
        }
    }

    // Take over the unwritten bytes of `other`, because the memory of `other` passes to this
    // storage.
    void take_unwritten(SpecialMemory& other) {
        if (other.unwritten() != nullptr) {
            parts().unwritten = std::exchange(other.parts_->unwritten, std::nullopt);
        }
    }

    void drop_gathered() noexcept {
        if (parts_) {
            parts_->gathered.reset();
        }
    }

    // Take over the state of external memory from `other`, because the memory of `other` passes to
    // this storage.
    void take_external(SpecialMemory& other) {
        if (other.is_external()) {
            parts().external = std::exchange(other.parts_->external, std::nullopt);
        }
    }

private:
    struct Parts final {
        std::optional<ExternalMemory> external;
        std::optional<Gathered> gathered;
        std::optional<UnwrittenBytes> unwritten;
    };

    Parts& parts() {
        if (!parts_) {
            parts_ = std::make_unique<Parts>();
        }
        return *parts_;
    }

    std::unique_ptr<Parts> parts_;
};

// What a source is to the training step, as far as Rekindle knows. Reports say what was moved.
enum class Role : std::uint8_t { unknown, parameter, gradient, state };

struct StorageRecord final : Storage {
    StorageRecord(Graph& graph, StorageId number, Bytes counted)
        : Storage(graph, number, counted) {}

    // Bytes of the storage on any device. (The budget counts only memory on its own device.)
    Bytes size = 0;
    // address of the memory, which is the key in the registry's address table; null: not in memory
    const void* address = nullptr;
    // The runtime's strong reference to the storage. Null if only the program keeps the memory
    // alive, or if the value is evicted.
    StoragePtr keeper;
    // Weak pointer to the storage, which the runtime (`keeper`) or the program keeps alive.
    WeakStorage storage_impl = no_storage();
    // Weak pointer to a tensor of the program that has the version counter `version`.
    WeakTensor origin = no_tensor();
    Version version;
    // operator that made the value; null: the value was first seen as an argument of an operator
    const Facts* maker = nullptr;
    Ref<Storage> successor;  // record of the value that replaced this one in the same memory
    // Previous and next record in the registry's list of records whose storages the program may
    // hold.
    StorageRecord* held_before = nullptr;
    StorageRecord* held_after = nullptr;
    // Length of the chain of recipes from the nearest value without a recipe to this value, as
    // `prune_history` counts it.
    std::int32_t depth = 0;
    // the same length for a value made with grad mode off, as `exceeds_chain_limit` counts it
    std::uint16_t chain = 0;
    std::uint8_t flags : 3 = 0;  // properties of the content (`ops/facts.h`)
    // The record is in the registry's list of records whose storages the program may hold.
    bool maybe_held : 1 = false;
    // the storage is a parameter: a leaf tensor that requires a gradient
    bool parameter : 1 = false;
    // the storage has no deleter hook, so nothing reports when PyTorch frees it
    bool untracked : 1 = false;
    // The value may be evicted while the program holds it: it is floating point, and only operators
    // read it.
    bool suits_held_eviction : 1 = false;
    bool leaving : 1 = false;  // a copy of the value to the host is in flight
    // the engine regards the value as in memory, but its copy from the host is in flight
    bool coming : 1 = false;
    // the value was evicted while the program holds it, so that its storage is empty
    bool placeholder : 1 = false;
    // The value was never computed, and cannot be any more: a tensor that it needs was overwritten.
    bool lost : 1 = false;
    // The version counter of `origin` also counts writes to other memory. So a change of the
    // counter does not prove that this value was written.
    bool shares_version_counter : 1 = false;
    bool unwatched : 1 = false;  // the version counter of the value's tensors was not read yet
    // Code may read the memory of this value without calling an operator or holding a reference.
    bool read_unseen : 1 = false;
    Role role : 2 = Role::unknown;
    SpecialMemory special;

    // Forget what is known of the contents: they were written, or the value has lost its recipe.
    void clear_flags() noexcept {
        flags = 0;
        special.drop_unwritten();
    }

    // Take over which bytes of `before` are unwritten. An operator has written the memory of
    // `before` in place, and this record replaces `before`.
    void take_unwritten(StorageRecord& before) {
        if ((before.flags & UNWRITTEN) != 0) {
            flags |= UNWRITTEN;
            special.take_unwritten(before.special);
        }
    }

    const char* site() const noexcept { return maker == nullptr ? "source" : maker->name.c_str(); }

    // Return the storage of a value that is in memory.
    StoragePtr at() const { return keeper ? keeper : storage_impl.lock(); }

    // Take a strong reference to the memory, so that only the runtime decides when to free it.
    void own() {
        if (!keeper) {
            keeper = storage_impl.lock();
        }
    }

    // Return true if the value lives in the storage `other`, which is alive.
    bool is_in(const c10::StorageImpl& other) const noexcept {
        return (keeper ? keeper.get() : storage_impl._unsafe_get_target()) == &other;
    }

    // Return true if the program holds a reference to the storage, in addition to the runtime's.
    bool is_held() const noexcept;
    // Start to check for writes to this value. A recipe or autograd is about to read it through the
    // tensor `reader`.
    void find_version_counter(const c10::TensorImpl& reader);
    // Use the version counter of `reader` to detect writes to this value.
    void follow(const c10::TensorImpl& reader);
    // Return true if the version counter shows that the value, which is in `there`, was written,
    // and no operator inside the budget has written it.
    bool was_modified(const StoragePtr& there);
    // The tensor `tensor` of the program has other memory from now on (`tensor.data = ...`). So its
    // version counter no longer counts writes to this value.
    void stop_following(const c10::TensorImpl& tensor);

private:
    bool origin_is_at(const StoragePtr& there) const;
    bool counts_with(const StorageRecord& other) const;
    bool is_counted_with_others() const;
};

inline StorageRecord& record_of(Storage& storage) noexcept {
    return static_cast<StorageRecord&>(storage);
}

// Return true if the program holds the value of `record`, and can write it, but the engine may
// evict it.
inline bool is_held_but_evictable(const StorageRecord& record) noexcept {
    return record.held && record.evictable_while_held;
}

// Return the record of the newest value in the memory of `record`, after all in-place writes.
inline StorageRecord& current(StorageRecord& record) noexcept {
    StorageRecord* found = &record;
    while (found->successor) {
        found = static_cast<StorageRecord*>(found->successor.get());
    }
    return *found;
}

// Remember that the program refers to the new source `record` by `tensor`. The tensor's version
// counter shows later writes by the program.
void describe(StorageRecord& record, const c10::TensorImpl& tensor);
// Store a weak reference to `tensor`, by which the program refers to the value of `record`, but no
// reference to its version counter. Autograd takes a new result without copying it only if nothing
// else refers to the counter.
void remember(StorageRecord& record, const c10::TensorImpl& tensor);
// Store the checksum of the weight `record` when recipes start to read it. Each recomputation
// compares the weight with this checksum, and raises if it has changed.
void note_checksum(const StorageRecord& record);
// Return true if `storage_impl`, the memory of the gathered parameter `record`, again has the
// contents that recipes need.
bool is_back(StorageRecord& record, const StoragePtr& storage_impl);

}  // namespace rekindle
