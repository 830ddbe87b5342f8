#include "deaths.h"

#include <algorithm>
#include <memory>
#include <mutex>

#include "../allocator/counting.h"
#include "../base/slab.h"

namespace rekindle {

namespace {}  // namespace

// All queues. Never destroyed: deleters also run while the process ends.
struct Everybody final {
    std::vector<Deaths*> listening;

    // Queue `address`, whose memory is about to be freed. Return true if a queue must be drained at
    // once.
    bool hears_of(const void* address) {
        bool late = false;
        for (Deaths* each : listening) {
            each->addresses_.push_back(address);
            each->any_.store(true, std::memory_order_release);
            late = late || each->late.load(std::memory_order_relaxed);
        }
        return late;
    }
};

namespace {

SpinLock& deaths_flag() noexcept {
    return leaf(Leaf::deaths);
}

Everybody& everybody() noexcept {
    static auto& made = immortal<Everybody>();
    return made;
}

// Queue `context` before `free` makes its address available to others.
template <class F>
void tell_and(void* context, F&& free) {
    bool late = false;
    {
        const std::scoped_lock guard(deaths_flag());
        late = everybody().hears_of(context);
    }
    free();
    if (late) {
        settle_late();
    }
}

// Usually `to` is empty, and nothing is copied.
template <class T>
void move_all(std::vector<T>& from, std::vector<T>& to) {
    if (to.empty()) {
        to.swap(from);
        return;
    }
    to.insert(to.end(), from.begin(), from.end());
    from.clear();
}

// Replacement for the deleter that `Frees` returns. There are two instantiations: for memory of the
// original CPU allocator and for memory of the counting wrapper.
template <c10::DeleterFnPtr (*Frees)() noexcept>
void tell_and_free(void* context) {
    tell_and(context, [&] { Frees()(context); });
}

}  // namespace

Deaths::Deaths() {
    const std::scoped_lock guard(deaths_flag());
    everybody().listening.push_back(this);
}

Deaths::~Deaths() {
    const std::scoped_lock guard(deaths_flag());
    std::erase(everybody().listening, this);
}

void Deaths::released(Record& record) {
    const std::scoped_lock guard(deaths_flag());
    records_.push_back(&record);
    any_.store(true, std::memory_order_release);
}

void Deaths::take(std::vector<const void*>& addresses, std::vector<Record*>& records) {
    const std::scoped_lock guard(deaths_flag());
    move_all(addresses_, addresses);
    move_all(records_, records);
    any_.store(false, std::memory_order_release);
}

void tell_and_forget_token(void* token) {
    std::unique_ptr<char> owned(static_cast<char*>(token));
    tell_and(token, [&] { owned.reset(); });
}

bool watch(c10::StorageImpl& home) noexcept {
    c10::DataPtr& data = home._mutable_data_ptr_no_checks();
    constexpr c10::DeleterFnPtr watched = &tell_and_free<allocators_own>;
    constexpr c10::DeleterFnPtr counted_and_watched = &tell_and_free<counting_ones_own>;
    const c10::DeleterFnPtr deleter = data.get_deleter();
    if (deleter == watched || deleter == counted_and_watched) {
        return true;
    }
    return data.get_context() == data.get() &&
           (data.compare_exchange_deleter(counting_ones_own(), counted_and_watched) ||
            data.compare_exchange_deleter(allocators_own(), watched));
}

}  // namespace rekindle
