// Units shared by all rooms; twin of rekindle._types. All are integers, so that equality is exact.
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
