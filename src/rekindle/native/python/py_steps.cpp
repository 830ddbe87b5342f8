#include "py_steps.h"

#include <array>
#include <cstdint>
#include <vector>

#include "../allocator/arena.h"
#include "../base/mutex.h"
#include "../memory/held/held_eviction.h"
#include "../memory/notify.h"
#include "conversions.h"

namespace rekindle {

// take_samples(driver) -> bytes
//
// Return the samples of memory over time as an array of 64-bit words, and clear them.
PyObject* take_samples(PyObject* arguments) {
    Session& session = session_in(arguments);
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

// space_samples(driver, next, every) -> None
//
// Take the next sample of memory when the engine's clock is `next`, and later samples every `every`
// (both in ns).
PyObject* space_samples(PyObject* arguments) {
    PyObject* capsule = nullptr;
    long long next = 0;
    long long every = 0;
    parse(arguments, "OLL", &capsule, &next, &every);
    const Locked lock;
    session_of(capsule).observers.samples.space(next, every);
    return nothing();
}

// set_budget(driver, nbytes) -> None
//
// Change the budget to `nbytes`; negative: no limit.
PyObject* set_budget(PyObject* arguments) {
    PyObject* capsule = nullptr;
    long long budget = 0;
    parse(arguments, "OL", &capsule, &budget);
    const Locked lock;
    Session& session = session_of(capsule);
    session.engine.budget = budget < 0 ? UNLIMITED : budget;
    session.room.backoff.forget();
    session.room.reserved.forget();
    if (session.uses_arena) {
        the_arena().limit(session.engine.budget);
    }
    return nothing();
}

// backoff(driver) -> (int, int, int, int)
//
// Return four numbers. 1: how often the device had less memory than the budget. 2: the present
// budget, or -1 for no limit. 3: how often evicting values at adjacent addresses did not suffice.
// 4: how often values were evicted to make one free block of memory.
PyObject* backoff(PyObject* arguments) {
    const Session& session = session_in(arguments);
    std::array<std::int64_t, 4> found{};
    {
        const Locked lock;
        const Bytes budget = session.engine.budget == UNLIMITED ? -1 : session.engine.budget;
        const BudgetBackoff& backoff = session.room.backoff;
        found = {backoff.times(), budget, backoff.by_sum(), session.room.reserved.places()};
    }
    return tuple_of(found);
}

// keep_reserved(driver) -> None
//
// Make the budget limit the memory that the device's allocator reserves, not only memory in use.
PyObject* keep_reserved(PyObject* arguments) {
    Session& session = session_in(arguments);
    const Locked lock;
    session.room.reserved.is_the_budget = true;
    session.device.empty_cache();
    return nothing();
}

// new_parameters(driver) -> list[int]
//
// Return the addresses of the storages of weights that operators have used for the first time since
// the last call of this function.
PyObject* new_parameters(PyObject* arguments) {
    Session& session = session_in(arguments);
    std::vector<const void*> found;
    {
        const Locked lock;
        found.swap(session.observers.due.new_parameters);
        session.observers.due.owners_due = false;
    }
    Object list(PyList_New(0));
    for (const void* storage_impl : found) {
        const Object address(PyLong_FromVoidPtr(const_cast<void*>(storage_impl)));
        must(PyList_Append(list.get(), address.get()) == 0);
    }
    return list.give();
}

// release_recompute_sources(driver) -> bool
//
// Release storages without a recipe that are kept only to recompute resident values. Return True if
// memory was freed.
PyObject* release_recompute_sources(PyObject* arguments) {
    Session& session = session_in(arguments);
    const bool any = translate_errors(session, [&] {
        const Locked lock;
        session.frees.process_pending();
        return session.room.release_recompute_sources();
    });
    return PyBool_FromLong(any ? 1 : 0);
}

}  // namespace rekindle
