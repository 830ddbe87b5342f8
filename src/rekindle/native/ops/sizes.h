// Computes sizes of results: those that depend on the contents of arguments, as for `nonzero`, and
// upper bounds of others.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <span>

#include "../base/types.h"
#include "signature.h"

namespace rekindle {

// Bytes that `bytes_of_dynamic` allocates: a tensor of one number, which counts the selected
// elements.
inline constexpr Bytes COUNT_BYTES = 8;

// Return the bytes of an operator's results, or a good upper bound. If neither can be computed
// quickly, return `UNLIMITED`. This function runs operators on the arguments `given`.
Need bytes_of_dynamic(const Facts& facts, std::span<const c10::IValue> given);

// Return the number of elements that tensors with these geometries have when they are broadcast
// together, or more if they cannot be.
std::int64_t broadcast_elements(std::span<const Geometry> geometries);

// Return an upper bound of the bytes of the results of a call with these arguments, from the sizes
// of the arguments alone. This takes far less time than a meta kernel. Return -1 for an operator
// for which no bound is known.
Bytes most_bytes(const Signature& signature, std::span<const c10::IValue> given);

}  // namespace rekindle
