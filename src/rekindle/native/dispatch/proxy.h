// The engine in front of autograd's own: it hands out our handles where a tensor is saved.
//
// `SavedVariable` asks the default engine for the hooks in force. PythonEngine is hidden, but what
// its stub is may be set: everything else is passed on to it.
#pragma once

namespace rekindle {

// From now on autograd asks us. Once.
void stand_before_autograd();

}  // namespace rekindle
