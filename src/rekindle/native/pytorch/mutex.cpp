#include "mutex.h"

#include <memory>

#include "python.h"

namespace rekindle {

void Mutex::wait() {
    const WithoutGil guard;
    mutex_.lock();
}

void forget_owner() noexcept {
    std::construct_at(&the_mutex());
}

}  // namespace rekindle
