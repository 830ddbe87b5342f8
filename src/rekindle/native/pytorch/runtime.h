// What operators do under a budget becomes events of the engine. Twin of
// rekindle.pytorch.online._runtime; rules are cited as there.
#pragma once

#include <string>

namespace rekindle {

// From now on operators are seen, in threads that include the key. Returns why not, empty if all is
// well. Once.
const char* see_operators();

}  // namespace rekindle
