// Sizes of results that the content of arguments decides.
#pragma once

#include <c10/util/ArrayRef.h>

#include "../base/types.h"
#include "signature.h"

namespace rekindle {

inline constexpr Bytes COUNT_BYTES = 8;  // what it takes to find out

// The size of what a call makes, or a better bound, where that is quick to know; `UNLIMITED` where
// it is not. Computes.
Need bytes_of_dynamic(const Facts& facts, std::span<const c10::IValue> given);

}  // namespace rekindle
