#include "mutex.h"

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

void begin_child() noexcept {
    give_leaves_back();
    the_mutex().forget_other_threads();
}

[[maybe_unused]] const int AT_FORK = pthread_atfork(&take_leaves, &give_leaves_back, &begin_child);

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

// The openings of other threads are on their stacks, which new threads of this process will use.
void Mutex::forget_other_threads() noexcept {
    waiting_ = 0;
    if (!mine()) {
        owner_ = pthread_t{};  // fork() ran without `about_to_fork`
    }
    Opening** at = &first_opening_;
    while (*at != nullptr) {
        if ((*at)->thread_ == this_thread()) {
            at = &(*at)->next_;
        } else {
            *at = (*at)->next_;
        }
    }
}

std::size_t Mutex::openings() const noexcept {
    std::size_t found = 0;
    for (const Opening* each = first_opening_; each != nullptr; each = each->next_) {
        ++found;
    }
    return found;
}

void about_to_fork() {
    if (!the_mutex().mine()) {
        the_mutex().lock();
        taken_to_fork = true;
    }
}

void forked() noexcept {
    if (the_mutex().mine() && std::exchange(taken_to_fork, false)) {
        the_mutex().unlock();
    }
}

}  // namespace rekindle
