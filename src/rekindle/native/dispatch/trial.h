// What a trial shows (ops/probation.h): whether two runs of a call are the same.
#pragma once

#include <ATen/core/ivalue.h>

#include <span>
#include <string>

#include "../ops/probation.h"
#include "../torch/storage_ptr.h"

namespace rekindle {

// Return what differs between the results of two runs of a call on `inputs`, or null if they are
// equal bit for bit and each run returned memory of its own.
const char* difference(
    std::span<const c10::IValue> first,
    std::span<const c10::IValue> again,
    std::span<const StoragePtr> inputs
);

// This thread ran the forward pass of an autograd.Function as one operator.
void note_unit(const Probation& probation);
// What was known of the last one that this thread ran, when it was over.
const Probation& last_unit() noexcept;

}  // namespace rekindle
