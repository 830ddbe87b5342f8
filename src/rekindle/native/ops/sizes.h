// Computes result sizes that depend on values of the arguments, as for `nonzero`.
#pragma once

#include <c10/util/ArrayRef.h>

#include "../base/types.h"
#include "signature.h"

namespace rekindle {

// Bytes that computing such a size takes: room for the count.
inline constexpr Bytes COUNT_BYTES = 8;

// Return the exact bytes of the results, or a good upper bound, if they can be computed quickly;
// otherwise `UNLIMITED`. Runs operators on the arguments.
Need bytes_of_dynamic(const Facts& facts, std::span<const c10::IValue> given);

}  // namespace rekindle
