// A flag that each thread of the program has for itself.
#pragma once

#include <algorithm>
#include <thread>
#include <vector>

namespace rekindle {

// The caller holds the session mutex.
class ThreadFlag final {
public:
    ThreadFlag() = default;
    ThreadFlag(const ThreadFlag&) = delete;
    ThreadFlag& operator=(const ThreadFlag&) = delete;
    ~ThreadFlag() = default;

    // Set or clear the flag of this thread.
    void set(bool on) {
        std::erase(threads_, std::this_thread::get_id());
        if (on) {
            threads_.push_back(std::this_thread::get_id());
        }
    }

    // Return true if the flag of this thread is set.
    bool is_set() const noexcept {
        return !threads_.empty() &&
               std::ranges::find(threads_, std::this_thread::get_id()) != threads_.end();
    }

private:
    std::vector<std::thread::id> threads_;  // those whose flag is set
};

}  // namespace rekindle
