// Scope in which this thread holds the GIL.
#pragma once

#include <Python.h>

namespace rekindle {

// Takes the GIL, also in threads that Python did not start. See NOTE [Lock discipline] in
// base/mutex.h.
class Gil final {
public:
    Gil() : state_(PyGILState_Ensure()) {}

    Gil(const Gil&) = delete;
    Gil& operator=(const Gil&) = delete;

    ~Gil() { PyGILState_Release(state_); }

private:
    PyGILState_STATE state_;
};

}  // namespace rekindle
