// Tells drivers of memory that is gone.
//
// The deleter of each storage that is known is replaced by ours, which queues the address and only
// then frees. So an address is in the queue before anybody can get it again: whoever empties the
// queue before registering an address is exact. It may run in any thread, amid anything.
#pragma once

#include <c10/core/StorageImpl.h>

#include <atomic>
#include <vector>

#include "../base/mutex.h"

namespace rekindle {

struct Everybody;
struct Record;

// What died, oldest first, until the driver acts on it.
class Deaths final {
public:
    Deaths();
    Deaths(const Deaths&) = delete;
    Deaths& operator=(const Deaths&) = delete;
    Deaths(Deaths&&) = delete;
    Deaths& operator=(Deaths&&) = delete;
    ~Deaths();

    bool any() const noexcept { return any_.load(std::memory_order_acquire); }

    // A handle of autograd's is gone.
    void released(Record& record);
    // Both since this was last asked, added to what is there.
    void take(std::vector<const void*>& addresses, std::vector<Record*>& records);

    // The context is over: no operator comes by any more to look.
    std::atomic<bool> late{false};

private:
    friend struct Everybody;

    // The rest with the leaf lock.
    std::atomic<bool> any_{false};
    std::vector<const void*> addresses_;
    std::vector<Record*> records_;
};

// From now on all drivers hear when the memory of `home` goes. False: it is not the allocator's.
bool watch(c10::StorageImpl& home) noexcept;
// All drivers hear that a storage without memory is gone, by the `char` that it had instead.
void tell_and_forget_token(void* token);
// All drivers act on what died, unless somebody is amid something: the next action makes up.
void settle_late() noexcept;

}  // namespace rekindle
