#include "py_swap.h"

#include <array>
#include <cstdint>

#include "../base/mutex.h"
#include "../memory/session.h"
#include "conversions.h"

namespace rekindle {

// swap(driver, copies, host, out, in, only) -> None
//
// From now on, swap values to the host. Must be called before an operator runs. `copies`: the
// object that stores swapped-out values. `host`: limit of host memory in bytes; negative: none.
// `out` and `in`: bandwidths in bytes per second. `only`: while the host has room, swap every
// evicted value instead of recomputing it.
//
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
    session_of(capsule).events.swap_with(
        {host < 0 ? UNLIMITED : host, out, back, only != 0}, copies
    );
    return nothing();
}

// swapped(driver) -> (int, int, int)
//
// Return the bytes swapped out and in so far, and the peak of swapped bytes on the host.
PyObject* swapped(PyObject* arguments) {
    const Session& session = session_in(arguments);
    std::array<std::int64_t, 3> found{};
    {
        const Locked lock;
        const HostMemory& host = *session.engine.host;
        found = {host.swapped_out, host.swapped_in, host.peak};
    }
    return tuple_of(found);
}

}  // namespace rekindle
