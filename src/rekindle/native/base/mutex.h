// The session's mutex, and the leaf locks. Order: the mutex, then one leaf lock; Python's own lock
// (GIL) before both or not at all.
#pragma once

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace rekindle {

// A leaf lock: a thread holds it for moments, and takes no other lock meanwhile.
class SpinLock final {
public:
    void lock() noexcept {
        while (flag_.test_and_set(std::memory_order_acquire)) {
            while (flag_.test(std::memory_order_relaxed)) {
                std::this_thread::yield();
            }
        }
    }

    void unlock() noexcept { flag_.clear(std::memory_order_release); }

private:
    std::atomic_flag flag_;
};

// Every leaf lock there is, by what it guards.
enum class Leaf : std::uint8_t { active, allocations, arena, deaths, parked };

inline constexpr std::size_t LEAVES = 5;

// The table of them. A child process has only the thread that forked, and would wait for ever for a
// lock that another thread held. So fork() first takes each of these, in this order, and gives it
// back in both processes. The session's mutex comes before them: `about_to_fork`.
inline SpinLock& leaf(Leaf which) noexcept {
    static constinit std::array<SpinLock, LEAVES> made;
    return made[static_cast<std::size_t>(which)];
}

// Not recursive: it is who has it. Who has to wait for it does so without the GIL: an operator that
// is run again may be written in Python.
class Mutex final {
public:
    // Amid something of ours, the thread that has the mutex lets others have it, because code that
    // is not ours runs now: an operator that is recomputed, a policy. Afterwards the thread has it
    // again.
    class Opening {
    public:
        Opening(const Opening&) = delete;
        Opening& operator=(const Opening&) = delete;
        Opening(Opening&&) = delete;
        Opening& operator=(Opening&&) = delete;
        virtual ~Opening() = default;

        // Whether anybody had the mutex meanwhile, this thread included.
        bool visited() const noexcept { return visited_; }

    protected:
        explicit Opening(Mutex& mutex) noexcept : mutex_(mutex), thread_(pthread_self()) {}

        void open() noexcept;
        void close() noexcept;
        // The first visitor has the mutex now, and has done nothing yet.
        virtual void is_visited() noexcept = 0;

    private:
        friend class Mutex;

        Mutex& mutex_;
        const pthread_t thread_;
        Opening* next_ = nullptr;
        bool closing_ = false;  // only its own thread looks
        bool visited_ = false;
    };

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

    // This thread gave it back, and takes it again.
    void lock_again() noexcept {
        pthread_t other{};
        if (!taken(other)) {
            wait();
        }
    }

    void unlock() noexcept {
        owner_.exchange({});  // a store might come after the look for those who wait
        owner_.notify_one();
    }

    // To read what it guards, or to change what no event hangs on: nobody is told of a visit.
    void lock_to_look() noexcept {
        pthread_t other{};
        if (!taken(other, false)) {
            wait(false);
        }
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
    bool taken(pthread_t& other, bool visits = true) noexcept {
        other = {};
        if (!owner_.compare_exchange_strong(other, pthread_self())) {
            return false;
        }
        if (visits && first_opening_ != nullptr) {
            visit();
        }
        return true;
    }

    void wait(bool visits = true) noexcept;
    void visit() noexcept;

    std::atomic<pthread_t> owner_;
    Opening* first_opening_ = nullptr;  // who has the mutex may look
};

// Of the whole core: contexts do not nest, and what is left of earlier ones has little to do.
inline Mutex& the_mutex() noexcept {
    static constinit Mutex made;
    return made;
}

// This thread is about to fork. No other may be amid something then, for nobody would finish it in
// the child process: takes the mutex, unless this thread has it.
void about_to_fork();
// Gives back what `about_to_fork` took. In the child, if fork() came without that, nobody has the
// mutex from now on.
void forked(bool in_child) noexcept;

// For who may be called with it as well as without.
inline std::unique_lock<Mutex> locked_if_not_mine() noexcept {
    if (the_mutex().mine()) {
        return {};
    }
    the_mutex().lock_again();
    return {the_mutex(), std::adopt_lock};
}

// A look at what the mutex guards, or at nothing that an event hangs on, from whichever thread.
class Looking final {
public:
    Looking() noexcept : mine_(the_mutex().mine()) {
        if (!mine_) {
            the_mutex().lock_to_look();
        }
    }

    Looking(const Looking&) = delete;
    Looking& operator=(const Looking&) = delete;
    Looking(Looking&&) = delete;
    Looking& operator=(Looking&&) = delete;

    ~Looking() {
        if (!mine_) {
            the_mutex().unlock();
        }
    }

private:
    const bool mine_;
};

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

// While it lives other threads may have the mutex. However that ends, it is held again.
class Unlocked final {
public:
    explicit Unlocked(Locked& lock) : lock_(lock) { lock_.unlock(); }

    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;
    Unlocked(Unlocked&&) = delete;
    Unlocked& operator=(Unlocked&&) = delete;

    ~Unlocked() {
        if (!lock_.is_held()) {
            lock_.lock_again();
        }
    }

private:
    Locked& lock_;
};

}  // namespace rekindle
