// Integer types for bytes, nanoseconds and ids, shared by all folders of the native core; twin of
// rekindle._types. Integers make comparisons exact.
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
