// Makes evicted tensors readable for PyTorch's profiler.
//
// NOTE [Profilers read addresses]
//
// Scenario: with `record_shapes=True` the profiler reads the address of each operand before the
// operator begins, so before an evicted operand is recomputed. The storage of an evicted tensor
// raises an error when its address is read. With such an error, the profiler would have an
// incomplete event. The end of the event would fail, or the profiler would assign shapes to wrong
// operators.
//
// So while the profiler's callback runs, the storage of an evicted tensor raises no error, and
// returns a null address. Nothing is recomputed for a profiler, so profiling does not change which
// values a program recomputes.
#include <ATen/record_function.h>

#include <array>
#include <memory>
#include <vector>

#include "../base/mutex.h"
#include "../ops/signature.h"
#include "../torch/geometry.h"
#include "../torch/placeholder.h"
#include "../torch/storage_ptr.h"
#include "methods.h"

namespace rekindle {

namespace functions {

namespace {

// Storages of evicted tensors whose address a profiler may read in this thread at the moment. At
// other times, reading the address of an evicted tensor raises an error.
thread_local std::vector<StoragePtr> readable;
// Handle of this thread's callback that runs after the profiler's own callback. Invalid while no
// profiler runs in this thread.
thread_local at::CallbackHandle last_callback = at::INVALID_CALLBACK_HANDLE;
// Number of profilers that run within the budget. Guarded by the GIL, like `last_callback`.
int profilers = 0;

// Called when an operator ends. Undo `allow`: from now on, reading the address of a storage in
// `readable` raises an error, as it did before. Empty the list.
void refuse_again(const at::RecordFunction& /*call*/, at::ObserverContext* /*none*/) {
    if (readable.empty()) {
        return;
    }
    const Looking looking;
    for (const StoragePtr& storage_impl : readable) {
        refuse_reading(*storage_impl);
    }
    readable.clear();
}

// Called when an operator begins, after the profiler has read the addresses of its operands. Undo
// `allow`.
std::unique_ptr<at::ObserverContext> refuse_first(const at::RecordFunction& call) {
    refuse_again(call, nullptr);
    return nullptr;
}

// Called when an operator begins, before the profiler reads the addresses of its operands. Let it
// read those of evicted operands, and add their storages to `readable`.
std::unique_ptr<at::ObserverContext> allow(const at::RecordFunction& call) {
    const Looking looking;
    const c10::ArrayRef<const c10::IValue> inputs = call.inputs();
    each_tensor({inputs.data(), inputs.size()}, [](std::uint32_t, const at::Tensor& tensor) {
        if (!tensor.defined() || !tensor.has_storage()) {
            return;
        }
        c10::StorageImpl* storage_impl =
            tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
        if (allow_reading(*storage_impl)) {
            readable.push_back(StoragePtr::reclaim_copy(storage_impl));
        }
    });
    return nullptr;
}

// Return the handle of the callback that runs before the profiler's own callback. It is a global
// callback, because PyTorch runs global callbacks before those of a thread. It is disabled while no
// profiler runs, so that it costs operators nothing.
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

// Record that a profiler starts in this thread.
void profiler_starts() {
    if (last_callback == at::INVALID_CALLBACK_HANDLE) {
        if (profilers++ == 0) {
            at::reenableCallback(first());
        }
        last_callback = at::addThreadLocalCallback(at::RecordFunctionCallback(&refuse_first));
    }
}

// Record that the profiler of this thread stops.
void profiler_stops() {
    if (last_callback != at::INVALID_CALLBACK_HANDLE) {
        remove_last();
        if (profilers > 0) {
            --profilers;
            if (profilers == 0) {
                at::disableCallback(first());
            }
        }
    }
}

// Remove the callbacks at the end of a budget, because after that no tensor is evicted.
void profilers_are_over() {
    remove_last();
    if (profilers > 0) {
        profilers = 0;
        at::disableCallback(first());
    }
}

}  // namespace

}  // namespace functions

PyMethodDef* profiler_methods() {
    static std::array all{
        method<functions::profiler_starts>("profiler_starts"),
        method<functions::profiler_stops>("profiler_stops"),
        method<functions::profilers_are_over>("profilers_are_over"),
        PyMethodDef{},
    };
    return all.data();
}

}  // namespace rekindle
