// Assertions about internal state. Only builds with REKINDLE_CHECKED contain them; release builds
// skip them.
#pragma once

#ifdef REKINDLE_CHECKED
#include <cstdio>
#include <cstdlib>

namespace rekindle {

[[noreturn]] inline void assertion_failed(const char* what, const char* file, int line) {
    std::fprintf(stderr, "%s:%d: %s does not hold\n", file, line, what);
    std::abort();
}

}  // namespace rekindle

#define REKINDLE_ASSERT(what) \
    ((what) ? static_cast<void>(0) : ::rekindle::assertion_failed(#what, __FILE__, __LINE__))
#else
#define REKINDLE_ASSERT(what) static_cast<void>(0)
#endif
