#include <array>
#include <cstdint>
#include <vector>

#include "../allocator/arena.h"
#include "../base/mutex.h"
#include "../memory/held/held_eviction.h"
#include "../memory/notify.h"
#include "methods.h"

namespace rekindle {

namespace functions {

namespace {

// Return the samples of memory over time as an array of 64-bit words, and clear them.
PyObject* take_samples(Session& session) {
    std::vector<Sample> taken;
    {
        const Locked lock;
        taken = session.observers.samples.take();
    }
    return PyBytes_FromStringAndSize(
        reinterpret_cast<const char*>(taken.data()),
        static_cast<Py_ssize_t>(taken.size() * sizeof(Sample))
    );
}

// Take the next sample of memory when the engine's clock is `next`, and later samples every `every`
// (both in ns).
void space_samples(Session& session, std::int64_t next, std::int64_t every) {
    const Locked lock;
    session.observers.samples.space(next, every);
}

// Change the budget to `nbytes`; negative: no limit.
void set_budget(Session& session, std::int64_t budget) {
    const Locked lock;
    session.engine.budget = budget < 0 ? UNLIMITED : budget;
    session.room.backoff.forget();
    session.room.reserved.forget();
    if (session.uses_arena) {
        the_arena().limit(session.engine.budget);
    }
}

// Return four numbers. 1: how often the device had less memory than the budget. 2: the present
// budget, or -1 for no limit. 3: how often evicting values at adjacent addresses did not suffice.
// 4: how often values were evicted to make one free block of memory.
std::array<std::int64_t, 4> backoff(const Session& session) {
    std::array<std::int64_t, 4> found{};
    {
        const Locked lock;
        const Bytes budget = session.engine.budget == UNLIMITED ? -1 : session.engine.budget;
        const BudgetBackoff& backoff = session.room.backoff;
        found = {backoff.times(), budget, backoff.by_sum(), session.room.reserved.places()};
    }
    return found;
}

// Make the budget limit the memory that the device's allocator reserves, not only memory in use.
void keep_reserved(Session& session) {
    const Locked lock;
    session.room.reserved.is_the_budget = true;
    session.device.empty_cache();
}

// Return the addresses of the storages of weights that operators have used for the first time since
// the last call of this function.
PyObject* new_parameters(Session& session) {
    std::vector<const void*> found;
    {
        const Locked lock;
        found.swap(session.observers.due.new_parameters);
        session.observers.due.owners_due = false;
    }
    return list_of(found, [](const void* storage_impl) {
        return PyLong_FromVoidPtr(const_cast<void*>(storage_impl));
    });
}

// Release storages without a recipe that are kept only to recompute resident values. Return True if
// memory was freed.
bool release_recompute_sources(Session& session) {
    const Locked lock;
    session.frees.process_pending();
    return session.room.release_recompute_sources();
}

}  // namespace

}  // namespace functions

PyMethodDef* step_methods() {
    static std::array all{
        method<functions::take_samples>("take_samples"),
        method<functions::space_samples>("space_samples"),
        method<functions::set_budget>("set_budget"),
        method<functions::keep_reserved>("keep_reserved"),
        method<functions::backoff>("backoff"),
        method<functions::new_parameters>("new_parameters"),
        method<functions::release_recompute_sources>("release_recompute_sources"),
        PyMethodDef{},
    };
    return all.data();
}

}  // namespace rekindle
