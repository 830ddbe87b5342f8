#include "mutex.h"

#include <memory>

#include "../base/slab.h"
#include "python.h"

namespace rekindle {

void Mutex::wait() {
    const WithoutGil guard;
    mutex_.lock();
}

Mutex& the_mutex() noexcept {
    static auto& made = immortal<Mutex>();
    return made;
}

void forget_owner() noexcept {
    std::construct_at(&the_mutex());
    Mutex::mine() = false;
}

}  // namespace rekindle
