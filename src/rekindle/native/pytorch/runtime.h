// What operators do under a budget becomes events of the engine. Twin of
// rekindle.pytorch.online._runtime; rules are cited as there.
#pragma once

#include <string>
#include <vector>

namespace rekindle {

// From now on operators are seen, in threads that include the key. `views`: those that make no
// memory and do no work, by name and overload. Returns why not, empty if all is well. Once.
std::string see_operators(const std::vector<std::string>& views);

}  // namespace rekindle
