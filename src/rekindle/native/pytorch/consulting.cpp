#include "consulting.h"

#include "swapper.h"

namespace rekindle {

Consulting::Consulting(Driver& driver)
    : Opening(the_mutex()), driver_(driver), interlude_(driver.engine) {
    open();
}

Consulting::~Consulting() {
    close();
    if (visited()) {
        if (driver_.swapper != nullptr) {
            driver_.swapper->go_on();
        }
        interlude_.visited();
    }
    driver_.collect();
}

// The lock is the visitor's.
void Consulting::is_visited() noexcept {
    if (driver_.swapper != nullptr) {
        driver_.swapper->pause();
    }
}

}  // namespace rekindle
