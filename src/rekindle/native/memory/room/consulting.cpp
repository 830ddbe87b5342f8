#include "consulting.h"

#include "../../torch/raised.h"

namespace rekindle {

Consulting::Consulting(Frees& frees)
    : Opening(the_mutex()), frees_(frees), interlude_(frees.engine) {
    open();
}

Consulting::~Consulting() {
    close();
    frees_.registry.drain();
    // True if the program freed a storage while Python code ran. The interrupted event of the
    // engine may still use that storage.
    const bool dropped = frees_.registry.any_gone();
    if (dropped) {
        without_throwing([&] { frees_.process_pending(); });
    }
    if (visited() || dropped) {
        if (frees_.events.swapper != nullptr) {
            frees_.events.swapper->go_on();
        }
        interlude_.visited();
    }
}

// Called by the first other thread that takes the session mutex while this scope has released it.
// That thread holds the mutex.
void Consulting::is_visited() noexcept {
    if (frees_.events.swapper != nullptr) {
        frees_.events.swapper->pause();
    }
}

}  // namespace rekindle
