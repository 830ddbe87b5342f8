#include "profiled.h"

#include <ATen/record_function.h>

#include <memory>
#include <vector>

#include "../base/mutex.h"
#include "../ops/signature.h"
#include "../torch/geometry.h"
#include "../torch/homes.h"
#include "../torch/husk.h"
#include "conversions.h"

namespace rekindle {

namespace {

// What this thread made readable, and has not refused since.
thread_local std::vector<Home> readable;
// The callback of this thread that comes after its profiler's, if one runs in it.
thread_local at::CallbackHandle last_callback = at::INVALID_CALLBACK_HANDLE;
// Profilers that run within the budget. Under the GIL, like the handles.
int profilers = 0;

void refuse_again(const at::RecordFunction& /*call*/, at::ObserverContext* /*none*/) {
    if (readable.empty()) {
        return;
    }
    const Looking looking;
    for (const Home& home : readable) {
        refuse_reading(*home);
    }
    readable.clear();
}

std::unique_ptr<at::ObserverContext> refuse_first(const at::RecordFunction& call) {
    refuse_again(call, nullptr);
    return nullptr;
}

std::unique_ptr<at::ObserverContext> allow(const at::RecordFunction& call) {
    const Looking looking;
    const c10::ArrayRef<const c10::IValue> inputs = call.inputs();
    each_tensor({inputs.data(), inputs.size()}, [](std::uint32_t, const at::Tensor& tensor) {
        if (!tensor.defined() || !tensor.has_storage()) {
            return;
        }
        c10::StorageImpl* home =
            tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
        if (allow_reading(*home)) {
            readable.push_back(Home::reclaim_copy(home));
        }
    });
    return nullptr;
}

// The callback that comes before those of profilers, because those of a thread come after all of
// the process. Without a profiler it is disabled, so that operators take no detour.
at::CallbackHandle first() {
    static const at::CallbackHandle handle = [] {
        const at::CallbackHandle made = at::addGlobalCallback(
            at::RecordFunctionCallback(&allow, &refuse_again).needsInputs(true)
        );
        at::disableCallback(made);
        return made;
    }();
    return handle;
}

void remove_last() {
    if (last_callback != at::INVALID_CALLBACK_HANDLE) {
        at::removeCallback(last_callback);
        last_callback = at::INVALID_CALLBACK_HANDLE;
    }
}

}  // namespace

// profiler_starts(): one runs in this thread from now on
PyObject* profiler_starts(PyObject* /*arguments*/) {
    if (last_callback == at::INVALID_CALLBACK_HANDLE) {
        if (profilers++ == 0) {
            at::reenableCallback(first());
        }
        last_callback = at::addThreadLocalCallback(at::RecordFunctionCallback(&refuse_first));
    }
    return nothing();
}

// profiler_stops(): that of this thread is over
PyObject* profiler_stops(PyObject* /*arguments*/) {
    if (last_callback != at::INVALID_CALLBACK_HANDLE) {
        remove_last();
        if (profilers > 0) {
            --profilers;
            if (profilers == 0) {
                at::disableCallback(first());
            }
        }
    }
    return nothing();
}

// profilers_are_over(): the budget is, and whatever profilers still run read no evicted tensor
PyObject* profilers_are_over(PyObject* /*arguments*/) {
    remove_last();
    if (profilers > 0) {
        profilers = 0;
        at::disableCallback(first());
    }
    return nothing();
}

}  // namespace rekindle
