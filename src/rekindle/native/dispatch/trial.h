// Functions for the trial of an operator: a second run that shows whether recomputation gives the
// same bits. See ops/probation.h and trial.cpp.
#pragma once

#include <ATen/core/ivalue.h>

#include <span>
#include <string>

#include "../ops/probation.h"
#include "../torch/storage_ptr.h"

namespace rekindle {

// Compare the results `first` and `again` of two runs of an operator call that reads the storages
// `inputs`. Return the difference as text, or null if the results are equal bit for bit and each
// run returned new memory.
const char* difference(
    std::span<const c10::IValue> first,
    std::span<const c10::IValue> again,
    std::span<const StoragePtr> inputs
);

// Remember in this thread the trials of an autograd.Function, whose forward pass just ran as one
// operator (a unit).
void note_unit(const Probation& probation);
// Return the trials that this thread last passed to `note_unit`.
const Probation& last_unit() noexcept;

}  // namespace rekindle
