// Sizes of results that depend on values of the arguments.
#pragma once

#include <c10/util/ArrayRef.h>

#include "../base/types.h"
#include "signature.h"

namespace rekindle {

inline constexpr Bytes COUNT_BYTES = 8;  // Memory needed to compute such a size.

// Return the exact size of the results, or a better bound, if it can be computed quickly; otherwise
// `UNLIMITED`. Runs operators on the arguments.
Need bytes_of_dynamic(const Facts& facts, std::span<const c10::IValue> given);

}  // namespace rekindle
