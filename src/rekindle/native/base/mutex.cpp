#include "mutex.h"

#include <memory>
#include <utility>

#include "without_gil.h"

namespace rekindle {

namespace {

// True from `about_to_fork` to `forked` if `about_to_fork` took the session mutex. Guarded by that
// mutex.
bool taken_to_fork = false;

void take_leaves() noexcept {
    for (std::size_t i = 0; i < LEAVES; ++i) {
        leaf(static_cast<Leaf>(i)).lock();
    }
}

void give_leaves_back() noexcept {
    for (std::size_t i = 0; i < LEAVES; ++i) {
        leaf(static_cast<Leaf>(i)).unlock();
    }
}

[[maybe_unused]] const int AT_FORK =
    pthread_atfork(&take_leaves, &give_leaves_back, &give_leaves_back);

}  // namespace

void Mutex::wait(bool visits) noexcept {
    const WithoutGil guard;
    ++waiting_;
    for (pthread_t other{}; !taken(other, visits);) {
        owner_.wait(other);
    }
    --waiting_;
}

void Mutex::Opening::open() noexcept {
    next_ = std::exchange(mutex_.first_opening_, this);
    mutex_.unlock();
}

void Mutex::Opening::close() noexcept {
    closing_ = true;
    mutex_.lock_again();
    Opening** at = &mutex_.first_opening_;
    while (*at != this) {
        at = &(*at)->next_;
    }
    *at = next_;
}

// Record in each open `Opening` that a thread took the mutex. Called by the thread that has just
// taken the mutex. An `Opening` that this thread is closing is skipped.
void Mutex::visit() noexcept {
    for (Opening* each = first_opening_; each != nullptr; each = each->next_) {
        if (each->thread_ == this_thread() && each->closing_) {
            continue;
        }
        if (!std::exchange(each->visited_, true)) {
            each->is_visited();
        }
    }
}

void about_to_fork() {
    if (!the_mutex().mine()) {
        the_mutex().lock();
        taken_to_fork = true;
    }
}

void forked(bool in_child) noexcept {
    if (the_mutex().mine()) {
        if (std::exchange(taken_to_fork, false)) {
            the_mutex().unlock();
        }
    } else if (in_child) {
        std::construct_at(&the_mutex());
    }
}

}  // namespace rekindle
