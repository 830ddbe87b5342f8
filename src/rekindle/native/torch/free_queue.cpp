#include "free_queue.h"

#include <algorithm>
#include <memory>
#include <mutex>

#include "../allocator/counting_allocator.h"
#include "../base/slab.h"

namespace rekindle {

// All queues of freed addresses. Never destroyed: deleters also run while the process ends.
struct FreeListeners final {
    std::vector<FreeQueue*> listening;

    // Add `address`, whose memory is about to be freed, to all queues of freed addresses. Return
    // true if a queue must be drained at once, because its budget has ended.
    bool push_to_all(const void* address) {
        bool late = false;
        for (FreeQueue* each : listening) {
            each->addresses_.push_back(address);
            each->any_.store(true, std::memory_order_release);
            late = late || each->late.load(std::memory_order_relaxed);
        }
        return late;
    }
};

namespace {

SpinLock& queue_lock() noexcept {
    return leaf(Leaf::free_queue);
}

FreeListeners& listeners() noexcept {
    static auto& made = leaky_singleton<FreeListeners>();
    return made;
}

// Add the address `context` to all queues of freed addresses, then call `free`. From then on the
// allocator may give out the address again.
template <class F>
void notify_then(void* context, F&& free) {
    bool late = false;
    {
        const std::scoped_lock guard(queue_lock());
        late = listeners().push_to_all(context);
    }
    free();
    if (late) {
        process_pending_late();
    }
}

// Move the elements of `from` to the end of `to`. `to` is usually empty, so that nothing is copied.
template <class T>
void move_all(std::vector<T>& from, std::vector<T>& to) {
    if (to.empty()) [[likely]] {
        to.swap(from);
        return;
    }
    to.insert(to.end(), from.begin(), from.end());
    from.clear();
}

// Deleter that replaces the one that `Frees` returns, to report freed memory. Instantiated twice:
// for memory of PyTorch's CPU allocator, and for memory of Rekindle's counting allocator.
template <c10::DeleterFnPtr (*Frees)() noexcept>
void notify_then_free(void* context) {
    notify_then(context, [&] { Frees()(context); });
}

}  // namespace

FreeQueue::FreeQueue() {
    const std::scoped_lock guard(queue_lock());
    listeners().listening.push_back(this);
}

FreeQueue::~FreeQueue() {
    const std::scoped_lock guard(queue_lock());
    std::erase(listeners().listening, this);
}

void FreeQueue::released(StorageRecord& record) {
    const std::scoped_lock guard(queue_lock());
    records_.push_back(&record);
    any_.store(true, std::memory_order_release);
}

void FreeQueue::take(std::vector<const void*>& addresses, std::vector<StorageRecord*>& records) {
    const std::scoped_lock guard(queue_lock());
    move_all(addresses_, addresses);
    move_all(records_, records);
    any_.store(false, std::memory_order_release);
}

void free_placeholder(void* token) {
    std::unique_ptr<char> keeper(static_cast<char*>(token));
    notify_then(token, [&] { keeper.reset(); });
}

bool hook_deleter(c10::StorageImpl& storage_impl) noexcept {
    c10::DataPtr& data = storage_impl._mutable_data_ptr_no_checks();
    constexpr c10::DeleterFnPtr notifying = &notify_then_free<pytorchs_deleter>;
    constexpr c10::DeleterFnPtr counting_then_notifying = &notify_then_free<counting_deleter>;
    const c10::DeleterFnPtr deleter = data.get_deleter();
    if (deleter == notifying || deleter == counting_then_notifying) [[unlikely]] {
        return true;
    }
    return data.get_context() == data.get() &&
           (data.compare_exchange_deleter(counting_deleter(), counting_then_notifying) ||
            data.compare_exchange_deleter(pytorchs_deleter(), notifying));
}

}  // namespace rekindle
