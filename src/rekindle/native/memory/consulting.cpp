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
    driver_.drain_free_queue();
    // The program has freed a storage that the interrupted event may use.
    const bool dropped = driver_.any_gone();
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

// The first other thread that takes the session mutex calls this, with the mutex held.
void Consulting::is_visited() noexcept {
    if (driver_.swapper != nullptr) {
        driver_.swapper->pause();
    }
}

}  // namespace rekindle
