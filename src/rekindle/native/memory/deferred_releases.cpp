#include "deferred_releases.h"

#include <mutex>
#include <utility>
#include <vector>

#include "../base/mutex.h"

namespace rekindle {

namespace {

struct DeferredReleases final {
    SpinLock& flag = leaf(Leaf::parked);
    std::vector<c10::intrusive_ptr<Session>> sessions;
};

DeferredReleases& parked() {
    static auto& made = leaky_singleton<DeferredReleases>();
    return made;
}

}  // namespace

void release_without_waiting(c10::intrusive_ptr<Session> session) noexcept {
    if (session.use_count() > 1 || the_mutex().mine()) {
        return;
    }
    if (the_mutex().try_lock()) {
        session.reset();
        the_mutex().unlock();
        return;
    }
    const std::scoped_lock guard(parked().flag);
    parked().sessions.push_back(std::move(session));
}

void release_deferred() noexcept {
    std::vector<c10::intrusive_ptr<Session>> sessions;
    {
        const std::scoped_lock guard(parked().flag);
        sessions.swap(parked().sessions);
    }
}

}  // namespace rekindle
