// Integer types for bytes, nanoseconds and ids, shared by all folders of the native core. The types
// are integers, so that comparisons are exact. rekindle._types has the same types for Python.
#pragma once

#include <cstdint>
#include <limits>

namespace rekindle {

using Bytes = std::int64_t;
using Nanoseconds = std::int64_t;
using StorageId = std::int64_t;
using OpId = std::int64_t;

inline constexpr Bytes UNLIMITED = std::numeric_limits<Bytes>::max();

}  // namespace rekindle
