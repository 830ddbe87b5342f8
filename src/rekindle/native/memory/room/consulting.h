// Releases the session mutex while Python code runs in the middle of an event of the engine.
//
// Used where the engine asks a policy written in Python, and where Python queries a device's
// allocator.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "../../base/mutex.h"
#include "../../torch/dispatch_key.h"
#include "frees.h"

namespace rekindle {

// Scope in which Python code, such as a user's policy, runs in the middle of an event of the
// engine.
//
// The Python code may wait for other threads, so the scope releases the session mutex, and other
// threads may run operators. Operators that the Python code itself runs bypass the budget. If
// another thread took the mutex, the interrupted event looks up all of its state again when the
// scope ends (`Engine::Interlude`).
class Consulting final : public Mutex::Opening {
public:
    explicit Consulting(Frees& frees);
    Consulting(const Consulting&) = delete;
    Consulting& operator=(const Consulting&) = delete;
    ~Consulting() override;

protected:
    void is_visited() noexcept override;

private:
    Frees& frees_;
    Engine::Interlude interlude_;
    const c10::impl::ExcludeDispatchKeyGuard passing_{KEY};
};

}  // namespace rekindle
