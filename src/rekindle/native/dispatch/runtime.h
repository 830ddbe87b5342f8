// Entry point of the core: the fallback that the dispatcher calls for every operator.
//
// The rules R1 to R12 are defined in docs/design.md. Code that implements one names it.
#pragma once

#include <string>

namespace rekindle {

// Register the fallback for our dispatch key, which threads inside a budget include. Must be called
// once. Return the reason if registration is impossible, else an empty string.
const char* register_fallback();

}  // namespace rekindle
