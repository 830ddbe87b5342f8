// Installs a proxy of autograd's engine that gives saved tensors our handles.
//
// `SavedVariable` asks the default engine for the hooks in force. The class of PyTorch's engine is
// hidden, but the stub that returns the default engine can be replaced. The proxy forwards every
// other call to PyTorch's engine.
#pragma once

namespace rekindle {

// Install the proxy. Further calls do nothing.
void install_engine_proxy();

}  // namespace rekindle
