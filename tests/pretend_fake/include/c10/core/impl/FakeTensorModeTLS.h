// The class of this name that torch has since 2.15, as far as the core uses it. The library that
// pretend.cpp makes defines its functions. For older versions of torch only.
#pragma once

#include <c10/core/TensorImpl.h>

#include <memory>

namespace c10::impl {

class FakeTensorModeTLS final {
public:
    static void set_state(std::shared_ptr<FakeTensorMode> state);
    static std::shared_ptr<FakeTensorMode> get_state();
    static void reset_state();
};

}  // namespace c10::impl
