#include <array>
#include <cstdint>

#include "../base/mutex.h"
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

}  // namespace

}  // namespace functions

PyMethodDef* swap_methods() {
    static std::array all{
        method<functions::swap>("swap"),
        method<functions::swapped>("swapped"),
        PyMethodDef{},
    };
    return all.data();
}

}  // namespace rekindle
