// What operators do under a budget becomes events of the engine.
//
// The rules are those of docs/design.md (R1 to R12); code that serves one names it.
#pragma once

#include <string>

namespace rekindle {

// From now on operators are seen, in threads that include the key. Returns why not, empty if all is
// well. Once.
const char* see_operators();

}  // namespace rekindle
