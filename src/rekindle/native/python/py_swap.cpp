#include <array>
#include <cstdint>
#include <vector>

#include "../allocator/arena.h"
#include "../base/mutex.h"
#include "../memory/evict_held_last.h"
#include "../memory/session.h"
#include "methods.h"

namespace rekindle {

namespace functions {

namespace {

// From now on, swap values to the host. Must be called before an operator runs. `copies`: the
// object that stores swapped-out values. `host`: limit of host memory in bytes; negative: none.
// `out` and `in`: bandwidths in bytes per second. `only`: while the host has room, swap every
// evicted value instead of recomputing it.
//
// NOLINTNEXTLINE(bugprone-exception-escape): it exchanges no two values
void swap(
    Session& session,
    PyObject* copies,
    std::int64_t host,
    std::int64_t out,
    std::int64_t back,
    bool only
) {
    const Locked lock;
    session.events.swap_with({host < 0 ? UNLIMITED : host, out, back, only}, copies);
}

// Return the bytes swapped out and in so far, and the peak of swapped bytes on the host.
std::array<std::int64_t, 3> swapped(const Session& session) {
    std::array<std::int64_t, 3> found{};
    {
        const Locked lock;
        const HostMemory& host = *session.engine.host;
        found = {host.swapped_out, host.swapped_in, host.peak};
    }
    return found;
}

// Move everything out of memory that may be evicted, and return free memory to the system or to the
// device. Return the bytes that stay.
std::int64_t release(Session& session) {
    Locked lock;
    session.frees.process_pending();
    about_to_let_go(session, lock);
    session.room.evict_all();
    session.events.wait_for_copies();
    if (session.device.queues()) {
        session.device.empty_cache();
    } else if (session.uses_arena) {
        the_arena().limit(session.engine.memory);
        the_arena().limit(session.engine.budget);
    }
    return session.engine.memory;
}

// Move the sources that the program holds back into memory, as long as they fit into the budget.
void resume(Session& session) {
    const Locked lock;
    session.frees.process_pending();
    std::vector<Ref<Storage>> away;
    for (Storage* each = session.engine.first_storage(); each != nullptr; each = each->next) {
        if (!each->resident && each->on_host && !each->replayable && each->held) {
            away.emplace_back(each);
        }
    }
    for (const Ref<Storage>& each : away) {
        const Engine& engine = session.engine;
        const bool fits =
            engine.budget == UNLIMITED || engine.memory + each->nbytes <= engine.budget;
        if (fits && each->listed && !each->resident) {
            session.room.use(record_of(*each));
        }
    }
    session.frees.process_pending();
}

// Record that a training step has ended: the next one may use sources in the same order.
void step_ended(Session& session) {
    const Locked lock;
    session.engine.step();
}

// Return four numbers for each kind of value: how often such values were swapped out, their bytes,
// how often they were swapped in, and their bytes. The order of kinds is that of `Moved`.
std::array<std::int64_t, 4 * Moved::KINDS> moved(const Session& session) {
    std::array<std::int64_t, 4 * Moved::KINDS> found{};
    const Locked lock;
    auto* next = found.data();
    for (const MovedKind& each : session.events.swapper->moved.all()) {
        for (const std::int64_t number : {each.times_out, each.out, each.times_in, each.in}) {
            *next++ = number;
        }
    }
    return found;
}

}  // namespace

}  // namespace functions

PyMethodDef* swap_methods() {
    static std::array all{
        method<functions::swap>("swap"),
        method<functions::swapped>("swapped"),
        method<functions::moved>("moved"),
        method<functions::step_ended>("step_ended"),
        method<functions::release>("release"),
        method<functions::resume>("resume"),
        PyMethodDef{},
    };
    return all.data();
}

}  // namespace rekindle
