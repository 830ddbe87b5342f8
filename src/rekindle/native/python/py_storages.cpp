#include "py_storages.h"

#include <utility>

#include "../memory/evict_held_last.h"
#include "../memory/session.h"
#include "../ops/kernel_operands.h"
#include "../torch/geometry.h"
#include "conversions.h"

namespace rekindle {

namespace {

// Parse the arguments (session, tensor), and call `act` with both if the tensor has memory.
template <class F>
PyObject* to_tensor(PyObject* arguments, F&& act) {
    PyObject* capsule = nullptr;
    PyObject* object = nullptr;
    parse(arguments, "OO", &capsule, &object);
    Session& session = session_of(capsule);
    const c10::TensorImpl& tensor = rekindle::tensor_of(object);
    settled(session, [&](Locked& lock) {
        if (has_memory(tensor)) {
            act(session, lock, tensor);
        }
    });
    return nothing();
}

// Do the same as `to_tensor`, unless the current thread runs an operator that reads the tensor. In
// this case the tensor is resident, and nothing needs to be done.
template <class F>
PyObject* to_absent_tensor(PyObject* arguments, F&& act) {
    PyObject* capsule = nullptr;
    PyObject* object = nullptr;
    parse(arguments, "OO", &capsule, &object);
    const c10::TensorImpl& tensor = rekindle::tensor_of(object);
    const bool there =
        has_memory(tensor) && KernelOperands::has(*tensor.unsafe_storage().unsafeGetStorageImpl());
    return there ? nothing() : to_tensor(arguments, std::forward<F>(act));
}

// Return the `StorageImpl` at `address`, the number by which Python refers to a storage.
c10::StorageImpl& storage_at(unsigned long long address) {
    return *reinterpret_cast<c10::StorageImpl*>(address);  // NOLINT(performance-no-int-to-ptr)
}

// Parse the arguments (session, address of a storage), and call `act`, a member function of
// `Sources`, with the storage. Do nothing if the current thread runs an operator with this storage.
template <auto act>
PyObject* to_storage(PyObject* arguments) {
    PyObject* capsule = nullptr;
    unsigned long long address = 0;
    parse(arguments, "OK", &capsule, &address);
    Session& session = session_of(capsule);
    c10::StorageImpl& storage_impl = storage_at(address);
    if (!KernelOperands::has(storage_impl)) {
        translate_errors(session, [&] {
            Locked lock;
            about_to_let_go(session, lock);
            retry_evicting_held(session, lock, [&] { (session.sources.*act)(storage_impl); });
        });
    }
    return nothing();
}

}  // namespace

// keep(driver, tensor) -> None
//
// Pin the storage of `tensor`.
PyObject* keep(PyObject* arguments) {
    return to_tensor(arguments, [](Session& session, Locked&, const c10::TensorImpl& tensor) {
        session.sources.keep(tensor);
    });
}

// bring_back(driver, tensor) -> None
//
// Restore the contents of `tensor` if it was evicted.
PyObject* bring_back(PyObject* arguments) {
    return to_absent_tensor(
        arguments, [](Session& session, Locked& lock, const c10::TensorImpl& tensor) {
            rekindle::bring_back(session, lock, tensor);
        }
    );
}

// pin_exposed_address(driver, tensor) -> None
//
// Restore the contents of `tensor`, and do not evict them while the program holds the tensor.
// Called because code outside of PyTorch gets the address of the tensor.
PyObject* pin_exposed_address(PyObject* arguments) {
    return to_absent_tensor(
        arguments, [](Session& session, Locked& lock, const c10::TensorImpl& tensor) {
            rekindle::bring_back(session, lock, tensor);
            session.held.pin_exposed_address(*tensor.unsafe_storage().unsafeGetStorageImpl());
        }
    );
}

// about_to_resize(driver, address, nbytes, newest) -> bool
//
// Prepare for a resize of the storage at `address` to `nbytes`. `newest`: a number if FSDP frees a
// module's parameter until the module's backward pass. It is the sequence number of the newest
// autograd node of the module's result. Negative if the program will not restore the contents.
// Return True if the storage has a record.
PyObject* about_to_resize(PyObject* arguments) {
    PyObject* capsule = nullptr;
    unsigned long long address = 0;
    long long bytes = 0;
    long long newest = 0;
    parse(arguments, "OKLL", &capsule, &address, &bytes, &newest);
    Session& session = session_of(capsule);
    c10::StorageImpl& storage_impl = storage_at(address);
    const bool known = settled(session, [&](Locked& /*lock*/) {
        return session.resizes.about_to_resize(storage_impl, bytes, newest);
    });
    return PyBool_FromLong(known ? 1 : 0);
}

// resized(driver) -> None
//
// Record that the resize that `about_to_resize` announced has been done.
PyObject* resized(PyObject* arguments) {
    Session& session = session_in(arguments);
    const Locked lock;
    session.resizes.has_been_resized();
    return nothing();
}

// mark_externally_writable(driver, address) -> None
//
// Protect recipes that read the storage at `address`: other code may write there.
PyObject* mark_externally_writable(PyObject* arguments) {
    return to_storage<&Sources::mark_externally_writable>(arguments);
}

// about_to_write_unseen(driver, address) -> None
//
// Prepare for one write to the storage at `address` by code that is no operator.
PyObject* about_to_write_unseen(PyObject* arguments) {
    return to_storage<&Sources::about_to_write_unseen>(arguments);
}

// version_raised(driver, address) -> None
//
// Keep values that were computed from the storage at `address`, because the program has raised the
// version of its tensors.
PyObject* version_raised(PyObject* arguments) {
    return to_storage<&Sources::version_raised>(arguments);
}

// suspend_origin_tracking(driver, tensor) -> None
//
// Drop the runtime's weak reference to `tensor`, because `torch.utils.swap_tensors` refuses tensors
// with weak references.
PyObject* suspend_origin_tracking(PyObject* arguments) {
    PyObject* capsule = nullptr;
    PyObject* object = nullptr;
    parse(arguments, "OO", &capsule, &object);
    const c10::TensorImpl& tensor = rekindle::tensor_of(object);
    const Locked lock;
    session_of(capsule).swapped_tensors.suspend(tensor);
    return nothing();
}

// resume_origin_tracking(driver) -> None
//
// Make new weak references to the tensors that were passed to `suspend_origin_tracking`.
PyObject* resume_origin_tracking(PyObject* arguments) {
    Session& session = session_in(arguments);
    const Locked lock;
    session.swapped_tensors.resume();
    return nothing();
}

}  // namespace rekindle
