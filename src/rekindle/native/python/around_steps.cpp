#include "around_steps.h"

#include <vector>

#include "../allocator/arena.h"
#include "../base/mutex.h"
#include "../memory/any_time.h"
#include "../memory/program.h"
#include "conversions.h"

namespace rekindle {

// take_samples(driver) -> their numbers as they lie in memory
PyObject* take_samples(PyObject* arguments) {
    Driver& driver = driver_in(arguments);
    std::vector<Sample> taken;
    {
        const Locked lock;
        taken = driver.samples.take();
    }
    return PyBytes_FromStringAndSize(
        reinterpret_cast<const char*>(taken.data()),
        static_cast<Py_ssize_t>(taken.size() * sizeof(Sample))
    );
}

// space_samples(driver, next, every): in ns
PyObject* space_samples(PyObject* arguments) {
    PyObject* capsule = nullptr;
    long long next = 0;
    long long every = 0;
    parse(arguments, "OLL", &capsule, &next, &every);
    const Locked lock;
    driver_of(capsule).samples.space(next, every);
    return nothing();
}

// set_budget(driver, bytes); a negative one is none
PyObject* set_budget(PyObject* arguments) {
    PyObject* capsule = nullptr;
    long long budget = 0;
    parse(arguments, "OL", &capsule, &budget);
    const Locked lock;
    Driver& driver = driver_of(capsule);
    driver.engine.budget = budget < 0 ? UNLIMITED : budget;
    driver.shortfall.forget();
    driver.reserved.forget();
    if (driver.uses_arena) {
        the_arena().limit(driver.engine.budget);
    }
    return nothing();
}

// shortfall(driver) -> how often the device had less than the budget says, what that is now, and
// how often no place among neighbors in memory helped
PyObject* shortfall(PyObject* arguments) {
    const Driver& driver = driver_in(arguments);
    const Locked lock;
    const Bytes budget = driver.engine.budget == UNLIMITED ? -1 : driver.engine.budget;
    const Shortfall& shortfall = driver.shortfall;
    return Py_BuildValue(
        "iLii",
        shortfall.times(),
        static_cast<long long>(budget),
        shortfall.by_sum(),
        driver.reserved.places()
    );
}

// keep_reserved(driver): the budget is one of what the device's allocator reserves
PyObject* keep_reserved(PyObject* arguments) {
    Driver& driver = driver_in(arguments);
    const Locked lock;
    driver.reserved.is_the_budget = true;
    driver.device.empty_cache();
    return nothing();
}

// met(driver) -> the addresses of storages of weights that were met since this was last asked
PyObject* met(PyObject* arguments) {
    Driver& driver = driver_in(arguments);
    std::vector<const void*> found;
    {
        const Locked lock;
        found.swap(driver.met);
        driver.owners_due = false;
    }
    Object list(PyList_New(0));
    for (const void* home : found) {
        const Object address(PyLong_FromVoidPtr(const_cast<void*>(home)));
        must(PyList_Append(list.get(), address.get()) == 0);
    }
    return list.give();
}

// forget_sources(driver): what is kept for nothing but to compute again what is there goes
// -> whether anything did
PyObject* forget_sources(PyObject* arguments) {
    Driver& driver = driver_in(arguments);
    const bool any = in_words(driver, [&] {
        const Locked lock;
        driver.settle();
        return driver.forget_sources();
    });
    return PyBool_FromLong(any ? 1 : 0);
}

}  // namespace rekindle
