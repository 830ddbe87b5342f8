// Installs a proxy of autograd's engine that makes `SavedVariable` use Rekindle's handles for saved
// tensors.
//
// For each saved tensor `SavedVariable` asks the default engine for the saved-tensor hooks in
// force. The class of that engine is hidden in PyTorch, but the function that returns the default
// engine can be replaced. The proxy forwards every other call to PyTorch's engine.
#pragma once

namespace rekindle {

// Install the proxy in front of autograd's engine. Calls after the first do nothing.
void install_engine_proxy();

}  // namespace rekindle
