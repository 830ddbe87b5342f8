// Queue through which the runtime learns that PyTorch freed a storage.
//
// NOTE [The queue of freed addresses]
//
// The runtime finds its records of storages by the address of their memory, so it must know when an
// address becomes invalid. It replaces the deleter of each storage that it knows. The new deleter
// first queues the address and then frees the memory. So an address is in the queue before the
// allocator can hand it out again. Code that drains the queue before it registers an address never
// confuses two storages.
//
// A deleter can run in any thread and under any lock. It therefore only adds to the queue, under a
// leaf lock, and runs nothing else of the runtime.
#pragma once

#include <c10/core/StorageImpl.h>

#include <atomic>
#include <vector>

#include "../base/mutex.h"

namespace rekindle {

struct FreeListeners;
struct StorageRecord;

// Queue of freed addresses, and of storage records to which a saved-tensor handle was destroyed,
// oldest first. The session drains it.
class FreeQueue final {
public:
    FreeQueue();
    FreeQueue(const FreeQueue&) = delete;
    FreeQueue& operator=(const FreeQueue&) = delete;
    ~FreeQueue();

    bool any() const noexcept { return any_.load(std::memory_order_acquire); }

    // Add `record` to the queue, because a reference to it has ended, as that of a saved-tensor
    // handle.
    void released(StorageRecord& record);
    // Move all queued entries to the end of `addresses` and `records`.
    void take(std::vector<const void*>& addresses, std::vector<StorageRecord*>& records);

    // The budget has ended. From then on no operator call drains the queue, so the deleter does.
    std::atomic<bool> late{false};

private:
    friend struct FreeListeners;

    // The short lock in this class guards the members below, but not `late`.
    std::atomic<bool> any_{false};
    std::vector<const void*> addresses_;
    std::vector<StorageRecord*> records_;
};

// Replace the deleter of `storage_impl`, so that all queues receive its address when it is freed.
// Return false if the memory is neither from PyTorch's allocator nor from `CountingAllocator`.
bool hook_deleter(c10::StorageImpl& storage_impl) noexcept;
// Deleter of a placeholder's token, a unique `char` in place of memory. Queues the token's address
// and frees the token.
void free_placeholder(void* token);
// Let all sessions process their queues of freed memory. If another thread is in the middle of an
// event, its next event does so.
void process_pending_late() noexcept;

}  // namespace rekindle
