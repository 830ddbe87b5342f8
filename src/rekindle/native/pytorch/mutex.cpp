#include "mutex.h"

#include <memory>

#include "without_gil.h"

namespace rekindle {

void Mutex::wait() {
    const WithoutGil guard;
    for (pthread_t other{}; !taken(other);) {
        owner_.wait(other);
    }
}

void forget_owner() noexcept {
    std::construct_at(&the_mutex());
}

}  // namespace rekindle
