#include "swapped.h"

#include "../base/mutex.h"
#include "../memory/driver.h"
#include "conversions.h"

namespace rekindle {

// swap(driver, copies, host, out, in, only): values may go to the host, of which a negative number
// of bytes is no limit; out and in are bytes in a second. Before anything runs
// NOLINTNEXTLINE(bugprone-exception-escape): it exchanges no two values
PyObject* swap(PyObject* arguments) {
    PyObject* capsule = nullptr;
    PyObject* copies = nullptr;
    long long host = 0;
    long long out = 0;
    long long back = 0;
    int only = 0;
    parse(arguments, "OOLLLp", &capsule, &copies, &host, &out, &back, &only);
    const Locked lock;
    driver_of(capsule).swap_with({host < 0 ? UNLIMITED : host, out, back, only != 0}, copies);
    return nothing();
}

// swapped(driver) -> bytes that went to the host and that came back in all, and most at once
PyObject* swapped(PyObject* arguments) {
    const Driver& driver = driver_in(arguments);
    const Locked lock;
    const HostMemory& host = *driver.engine.host;
    return Py_BuildValue(
        "LLL",
        static_cast<long long>(host.swapped_out),
        static_cast<long long>(host.swapped_in),
        static_cast<long long>(host.peak)
    );
}

}  // namespace rekindle
