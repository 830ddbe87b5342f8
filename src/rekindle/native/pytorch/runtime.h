// What operators do under a budget becomes events of the engine. Twin of
// rekindle.pytorch.online._runtime; rules are cited as there.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/util/intrusive_ptr.h>

#include <string>

namespace rekindle {

class Driver;

// From now on operators are seen, in threads that include the key. Returns why not, empty if all is
// well. Once.
std::string see_operators();
// Whose is an operator that is called with these keys; null: nobody's, it passes.
c10::intrusive_ptr<Driver> seeing(c10::DispatchKeySet keys);

}  // namespace rekindle
