#include "gil.h"

#include "../base/without_gil.h"

namespace rekindle {

WithoutGil::WithoutGil() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
        saved_ = PyEval_SaveThread();
    }
}

WithoutGil::~WithoutGil() {
    if (saved_ != nullptr) {
        PyEval_RestoreThread(static_cast<PyThreadState*>(saved_));
    }
}

}  // namespace rekindle
