#include "consulting.h"

#include "../torch/raised.h"
#include "swapper.h"

namespace rekindle {

Consulting::Consulting(Driver& driver)
    : Opening(the_mutex()), driver_(driver), interlude_(driver.engine) {
    open();
}

Consulting::~Consulting() {
    close();
    driver_.registry.drain();
    // True if the program freed a storage while Python code ran. The interrupted event of the
    // engine may still use that storage.
    const bool dropped = driver_.registry.any_gone();
    if (dropped) {
        without_throwing([&] { driver_.process_pending(); });
    }
    if (visited() || dropped) {
        if (driver_.swapper != nullptr) {
            driver_.swapper->go_on();
        }
        interlude_.visited();
    }
}

// Called by the first other thread that takes the session mutex while this scope has released it.
// That thread holds the mutex.
void Consulting::is_visited() noexcept {
    if (driver_.swapper != nullptr) {
        driver_.swapper->pause();
    }
}

}  // namespace rekindle
