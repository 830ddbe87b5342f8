// The locks of the native core: the session mutex and the leaf locks.
//
// NOTE [Lock discipline]
//
// | lock             | guards                           | while a thread holds it               |
// |------------------|----------------------------------|---------------------------------------|
// | GIL              | Python objects                   | It may take the session mutex or one  |
// |                  |                                  | leaf lock.                            |
// | session mutex    | engine, records, storage tables  | It may take one leaf lock, and the    |
// | (`the_mutex`)    |                                  | GIL (rule 2). It runs no user code.   |
// | a leaf lock      | one small structure each         | It takes no other lock and runs no    |
// | (`leaf`)         |                                  | user code.                            |
//
// 1. The order is the session mutex, then at most one leaf lock.
//
// 2. A thread that waits for the session mutex first releases the GIL (`Mutex::wait`). So the owner
// of the mutex can take the GIL without a deadlock. Two places rely on this rule: `Mutex::wait`,
// which takes the GIL back with the mutex held, and the calls of Python in
// `memory/room/host_store.h`.
//
// 3. User code never runs with the session mutex held: kernels, recomputed operators, policies,
// Python callbacks, finalizers. User code may start threads and wait for them, and those threads
// may need the mutex. `Unlocked` and `Mutex::Opening` release the mutex around user code.
//
// 4. Some destructors can run in any thread and under any lock, so they only add work to a queue.
// These are the deleters of storages (`torch/free_queue.h`), the destructors of saved-tensor
// handles (`dispatch/saved_tensor_handle.h`), and the release of the last reference to a session
// (`memory/deferred_releases.h`).
//
// 5. fork() takes every lock first, so that no other thread holds one in the child
// (`about_to_fork`, `leaf`). The child forgets the threads that it does not have
// (`Mutex::forget_other_threads`).
#pragma once

#include <pthread.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "assert.h"

namespace rekindle {

// Leaf lock (see NOTE [Lock discipline]). Hold a leaf lock only for a few instructions, and take no
// other lock meanwhile.
class SpinLock final {
public:
    void lock() noexcept {
        while (flag_.test_and_set(std::memory_order_acquire)) [[unlikely]] {
            while (flag_.test(std::memory_order_relaxed)) {
                std::this_thread::yield();
            }
        }
    }

    void unlock() noexcept { flag_.clear(std::memory_order_release); }

private:
    std::atomic_flag flag_;
};

// Names of the leaf locks. Each lock is named after the structure that it guards.
enum class Leaf : std::uint8_t { active, allocations, arena, free_queue, parked, pools };

inline constexpr std::size_t LEAVES = 6;

// Return the leaf lock `which`. A child process has only the thread that called fork(), so a lock
// held by another thread would never be released in the child. Therefore fork() takes all leaf
// locks, in the order of `Leaf`, and releases them in both processes. The session mutex is taken
// before the leaf locks (`about_to_fork`).
inline SpinLock& leaf(Leaf which) noexcept {
    static constinit std::array<SpinLock, LEAVES> made;
    return made[static_cast<std::size_t>(which)];
}

// Return the id of this thread. On Linux it is the thread pointer, so that no function is called.
inline pthread_t this_thread() noexcept {
#if defined(__linux__) && defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 11
    return std::bit_cast<pthread_t>(__builtin_thread_pointer());
#else
    return pthread_self();
#endif
}

// Mutex that stores its owner's thread id. It is not recursive. A waiting thread releases the GIL,
// because the owner of the mutex may need the GIL to go on.
class Mutex final {
public:
    // Scope in which the owner releases the mutex in the middle of an event (one call of the
    // engine), because user code runs: a recomputed operator or a policy. At the end of the scope
    // the owner takes the mutex again. The scope records if any thread took the mutex meanwhile.
    class Opening {
    public:
        Opening(const Opening&) = delete;
        Opening& operator=(const Opening&) = delete;
        virtual ~Opening() = default;

        // Return true if any thread, this one included, took the mutex since this scope began.
        bool visited() const noexcept { return visited_; }

    protected:
        explicit Opening(Mutex& mutex) noexcept : mutex_(mutex), thread_(this_thread()) {}

        void open() noexcept;
        void close() noexcept;
        // Called once, by the first thread that takes the mutex during the scope, right after that
        // thread has taken it.
        virtual void is_visited() noexcept = 0;

    private:
        friend class Mutex;

        Mutex& mutex_;
        const pthread_t thread_;
        Opening* next_ = nullptr;
        // True while the thread of the scope takes the mutex again. Only this thread reads the
        // flag.
        bool closing_ = false;
        bool visited_ = false;
    };

    // Take the mutex. Throw if this thread already holds it.
    void lock() {
        pthread_t other{};
        if (!taken(other)) [[unlikely]] {
            if (other == this_thread()) {
                throw std::logic_error(
                    "the native core was called again by a thread in which it was already running; "
                    "please report this"
                );
            }
            wait();
        }
    }

    // Take the mutex again after this thread released it temporarily. Unlike `lock`, it does not
    // check whether this thread already holds the mutex.
    void lock_again() noexcept {
        pthread_t other{};
        if (!taken(other)) [[unlikely]] {
            wait();
        }
    }

    void unlock() noexcept {
        // Use an exchange, because the compiler or the processor could move a plain store behind
        // the check for waiting threads.
        owner_.exchange({});
        if (waiting_.load() != 0) [[unlikely]] {
            owner_.notify_one();
        }
    }

    // Take the mutex to read state, or to change state that no event of the engine depends on. An
    // `Opening` does not record that its mutex was taken in this way.
    void lock_to_look() noexcept {
        pthread_t other{};
        if (!taken(other, false)) {
            wait(false);
        }
    }

    // Take the mutex if it is free. Return false if any thread, this one included, holds it.
    bool try_lock() noexcept {
        pthread_t other{};
        return taken(other);
    }

    // Forget all threads but this one. fork() has just made this process, and the process has no
    // other thread.
    void forget_other_threads() noexcept;

    // For tests: return the number of openings. The caller holds the mutex.
    std::size_t openings() const noexcept;

    // Return true if this thread holds the mutex. A relaxed load suffices: the value equals this
    // thread's id only if this thread stored it.
    bool mine() const noexcept { return owner_.load(std::memory_order_relaxed) == this_thread(); }

private:
    // Try to take the mutex. Return true on success; otherwise set `other` to the owner.
    bool taken(pthread_t& other, bool visits = true) noexcept {
        other = {};
        if (!owner_.compare_exchange_strong(other, this_thread())) [[unlikely]] {
            return false;
        }
        if (visits && first_opening_ != nullptr) [[unlikely]] {
            visit();
        }
        return true;
    }

    void wait(bool visits = true) noexcept;
    void visit() noexcept;

    std::atomic<pthread_t> owner_;
    std::atomic<std::uint32_t> waiting_ = 0;  // Number of threads in `wait`.
    Opening* first_opening_ = nullptr;        // Guarded by the mutex.
};

// Return the session mutex. The process has only one, because only one budget is active at a time.
inline Mutex& the_mutex() noexcept {
    static constinit Mutex made;
    return made;
}

// Abort in builds with REKINDLE_CHECKED (scripts/sanitize) unless this thread holds the session
// mutex.
inline void assert_locked() noexcept {
    REKINDLE_ASSERT(the_mutex().mine());
}

// Prepare for fork(): take the session mutex, unless this thread holds it. Without this, another
// thread could be in the middle of an event, which would stay unfinished in the child process.
void about_to_fork();
// Release the session mutex if `about_to_fork` took it.
void forked() noexcept;

// Take the session mutex unless this thread already holds it. Functions that are called with or
// without the mutex use this.
inline std::unique_lock<Mutex> locked_if_not_mine() noexcept {
    if (the_mutex().mine()) {
        return {};
    }
    the_mutex().lock_again();
    return {the_mutex(), std::adopt_lock};
}

// Scope that holds the session mutex for reading (`Mutex::lock_to_look`). Does nothing if this
// thread already holds the mutex.
class Looking final {
public:
    Looking() noexcept : mine_(the_mutex().mine()) {
        if (!mine_) {
            the_mutex().lock_to_look();
        }
    }

    Looking(const Looking&) = delete;
    Looking& operator=(const Looking&) = delete;

    ~Looking() {
        if (!mine_) {
            the_mutex().unlock();
        }
    }

private:
    const bool mine_;
};

// Scope that holds the session mutex. `Unlocked` can release the mutex within the scope.
class Locked final {
public:
    Locked() { the_mutex().lock(); }

    explicit Locked(std::adopt_lock_t /*taken*/) {}

    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;

    ~Locked() {
        if (held_) [[likely]] {
            the_mutex().unlock();
        }
    }

    void lock() {
        the_mutex().lock();
        held_ = true;
    }

    void lock_again() noexcept {
        the_mutex().lock_again();
        held_ = true;
    }

    void unlock() noexcept {
        held_ = false;
        the_mutex().unlock();
    }

    bool is_held() const noexcept { return held_; }

private:
    bool held_ = true;
};

// Scope that releases the session mutex of a `Locked`, and takes the mutex again at the end, also
// after an error.
class Unlocked final {
public:
    explicit Unlocked(Locked& lock) : lock_(lock) { lock_.unlock(); }

    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

    ~Unlocked() {
        if (!lock_.is_held()) [[likely]] {
            lock_.lock_again();
        }
    }

private:
    Locked& lock_;
};

}  // namespace rekindle
