// Where Python is asked amid an event: the lock is given back around what it runs.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "../base/mutex.h"
#include "../torch/dispatch_key.h"
#include "driver.h"

namespace rekindle {

// While it lives Python runs amid an event: the program's own policy, or what asks a device's
// allocator. That may wait for other threads, so others may have the lock. Operators that it runs
// in this thread just pass. Afterwards whoever asked looks up again all that it had looked up
// (`Engine::Interlude`), if anybody came.
class Consulting final : public Mutex::Opening {
public:
    explicit Consulting(Driver& driver);
    Consulting(const Consulting&) = delete;
    Consulting& operator=(const Consulting&) = delete;
    Consulting(Consulting&&) = delete;
    Consulting& operator=(Consulting&&) = delete;
    ~Consulting() override;

protected:
    void is_visited() noexcept override;

private:
    Driver& driver_;
    Engine::Interlude interlude_;
    const c10::impl::ExcludeDispatchKeyGuard passing_{KEY};
};

}  // namespace rekindle
