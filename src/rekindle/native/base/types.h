// The units that all parts share, twin of rekindle._types. Integers only, so that equality is
// exact.
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
