#include "deaths.h"

#include <pthread.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "../base/slab.h"
#include "counting.h"

namespace rekindle {

namespace {

// Who is to hear. Memory may be freed while the process ends.
struct Everybody final {
    // A thread that is amid this while another one forks is not there in the child process, which
    // would wait for it for ever.
    Everybody() { pthread_atfork(&hold, &let_go, &let_go); }

    static void hold() noexcept;
    static void let_go() noexcept;

    SpinLock flag;
    std::vector<Deaths*> listening;
};

Everybody& everybody() noexcept {
    static auto& made = immortal<Everybody>();
    return made;
}

void Everybody::hold() noexcept {
    everybody().flag.lock();
    for (Deaths* each : everybody().listening) {
        each->hold();
    }
}

void Everybody::let_go() noexcept {
    for (Deaths* each : everybody().listening) {
        each->let_go();
    }
    everybody().flag.unlock();
}

// Tells of `context` before `free` makes room for others at its address.
template <class F>
void tell_and(void* context, F&& free) {
    bool late = false;
    {
        Everybody& all = everybody();
        const std::scoped_lock guard(all.flag);
        for (Deaths* each : all.listening) {
            each->freed(context);
            late = late || each->late.load(std::memory_order_relaxed);
        }
    }
    free();
    if (late) {
        settle_late();
    }
}

// As a rule `to` is empty, and nothing is copied.
template <class T>
void move_all(std::vector<T>& from, std::vector<T>& to) {
    if (to.empty()) {
        to.swap(from);
        return;
    }
    to.insert(to.end(), from.begin(), from.end());
    from.clear();
}

// In the place of the deleter that `Frees` gives. Two kinds of memory go about: that of the
// allocator that was there, and that of the one that counts.
template <c10::DeleterFnPtr (*Frees)() noexcept>
void tell_and_free(void* context) {
    tell_and(context, [&] { Frees()(context); });
}

}  // namespace

Deaths::Deaths() {
    const std::scoped_lock guard(everybody().flag);
    everybody().listening.push_back(this);
}

Deaths::~Deaths() {
    const std::scoped_lock guard(everybody().flag);
    std::erase(everybody().listening, this);
}

void Deaths::freed(const void* address) {
    const std::scoped_lock guard(flag_);
    addresses_.push_back(address);
    any_.store(true, std::memory_order_release);
}

void Deaths::released(Record& record) {
    const std::scoped_lock guard(flag_);
    records_.push_back(&record);
    any_.store(true, std::memory_order_release);
}

void Deaths::take(std::vector<const void*>& addresses, std::vector<Record*>& records) {
    const std::scoped_lock guard(flag_);
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
