// The one lock of the core, and the flag that deaths take. Order: the lock, then the flag; Python's
// own lock (GIL) before both or not at all.
#pragma once

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <stdexcept>

namespace rekindle {

// Held for moments, with nothing inside that may wait.
class SpinLock final {
public:
    void lock() noexcept {
        while (flag_.test_and_set(std::memory_order_acquire)) {
        }
    }

    void unlock() noexcept { flag_.clear(std::memory_order_release); }

private:
    std::atomic_flag flag_;
};

// Not recursive: it is who has it. Who has to wait for it does so without the GIL: an operator that
// is run again may be written in Python.
class Mutex final {
public:
    void lock() {
        pthread_t other{};
        if (!taken(other)) {
            if (other == pthread_self()) {
                throw std::logic_error(
                    "the native core was asked for something amid something else"
                );
            }
            wait();
        }
    }

    void unlock() noexcept {
        owner_.exchange({});  // a store might come after the look for those who wait
        owner_.notify_one();
    }

    // Not if this thread has it, or another one.
    bool try_lock() noexcept {
        pthread_t other{};
        return taken(other);
    }

    // Whether this thread has it: of another one's coming and going nothing else is read.
    bool mine() const noexcept { return owner_.load(std::memory_order_relaxed) == pthread_self(); }

private:
    // Whether this thread has it from now on; else `other` has it.
    bool taken(pthread_t& other) noexcept {
        other = {};
        return owner_.compare_exchange_strong(other, pthread_self());
    }

    void wait();

    std::atomic<pthread_t> owner_;
};

// Of the whole core: contexts do not nest, and what is left of earlier ones has little to do.
inline Mutex& the_mutex() noexcept {
    static constinit Mutex made;
    return made;
}

// In a child process nobody has it.
void forget_owner() noexcept;

// For who may be called with it as well as without.
inline std::unique_lock<Mutex> locked_if_not_mine() {
    return the_mutex().mine() ? std::unique_lock<Mutex>() : std::unique_lock(the_mutex());
}

class Locked final {
public:
    Locked() { the_mutex().lock(); }

    explicit Locked(std::adopt_lock_t /*taken*/) {}

    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;
    Locked(Locked&&) = delete;
    Locked& operator=(Locked&&) = delete;

    ~Locked() {
        if (held_) {
            the_mutex().unlock();
        }
    }

    void lock() {
        the_mutex().lock();
        held_ = true;
    }

    void unlock() noexcept {
        held_ = false;
        the_mutex().unlock();
    }

private:
    bool held_ = true;
};

}  // namespace rekindle
