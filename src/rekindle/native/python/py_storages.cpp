#include <array>
#include <utility>

#include "../memory/evict_held_last.h"
#include "../memory/session.h"
#include "../ops/kernel_operands.h"
#include "../torch/geometry.h"
#include "methods.h"
#include "set_data.h"

namespace rekindle {

namespace functions {

namespace {

// Call `act` with `tensor` if the tensor has memory.
template <class F>
void to_tensor(Session& session, const c10::TensorImpl& tensor, F&& act) {
    settled(session, [&](Locked& lock) {
        if (has_memory(tensor)) {
            act(lock);
        }
    });
}

// Do the same as `to_tensor`, unless the current thread runs an operator that reads the tensor. In
// this case the tensor is resident, and nothing needs to be done.
template <class F>
void to_absent_tensor(Session& session, const c10::TensorImpl& tensor, F&& act) {
    if (!has_memory(tensor) ||
        !KernelOperands::has(*tensor.unsafe_storage().unsafeGetStorageImpl())) {
        to_tensor(session, tensor, std::forward<F>(act));
    }
}

// Call `act`, a member function of `Sources`, with the storage. Do nothing if the current thread
// runs an operator with this storage.
template <auto act>
void to_storage(Session& session, c10::StorageImpl& storage_impl) {
    if (!KernelOperands::has(storage_impl)) {
        Locked lock;
        about_to_let_go(session, lock);
        retry_evicting_held(session, lock, [&] { (session.sources.*act)(storage_impl); });
    }
}

// Pin the storage of `tensor`.
void keep(Session& session, const c10::TensorImpl& tensor) {
    to_tensor(session, tensor, [&](Locked& /*lock*/) { session.sources.keep(tensor); });
}

// Restore the contents of `tensor` if it was evicted.
void bring_back(Session& session, const c10::TensorImpl& tensor) {
    to_absent_tensor(session, tensor, [&](Locked& lock) {
        rekindle::bring_back(session, lock, tensor);
    });
}

// Restore the contents of `tensor`, and do not evict them while the program holds the tensor.
// Called because code outside of PyTorch gets the address of the tensor.
void pin_exposed_address(Session& session, const c10::TensorImpl& tensor) {
    to_absent_tensor(session, tensor, [&](Locked& lock) {
        rekindle::bring_back(session, lock, tensor);
        c10::StorageImpl& storage_impl = *tensor.unsafe_storage().unsafeGetStorageImpl();
        if (session.sources.expose(storage_impl, false) != nullptr) {
            session.held.pin_exposed_address(storage_impl);
        }
    });
}

// Prepare for a resize of `storage_impl` to `bytes`. `newest`: a number if FSDP frees a module's
// parameter until the module's backward pass. It is the sequence number of the newest autograd node
// of the module's result. Negative if the program will not restore the contents. Return true if the
// storage has a record.
bool about_to_resize(
    Session& session, c10::StorageImpl& storage_impl, std::int64_t bytes, std::int64_t newest
) {
    return settled(session, [&](Locked& /*lock*/) {
        return session.resizes.about_to_resize(storage_impl, bytes, newest);
    });
}

// Record that the resize that `about_to_resize` announced has been done.
void resized(Session& session) {
    const Locked lock;
    session.resizes.has_been_resized();
}

// Drop the runtime's weak reference to `tensor`, because `torch.utils.swap_tensors` refuses tensors
// with weak references.
void suspend_origin_tracking(Session& session, const c10::TensorImpl& tensor) {
    const Locked lock;
    session.swapped_tensors.suspend(tensor);
}

// Make new weak references to the tensors that were passed to `suspend_origin_tracking`.
void resume_origin_tracking(Session& session) {
    const Locked lock;
    session.swapped_tensors.resume();
}

}  // namespace

}  // namespace functions

PyMethodDef* storage_methods() {
    static std::array all{
        method<functions::keep>("keep"),
        method<functions::about_to_resize>("about_to_resize"),
        method<functions::resized>("resized"),
        // Protect recipes that read a storage: other code may write there.
        method<functions::to_storage<&Sources::mark_externally_writable>>(
            "mark_externally_writable"
        ),
        // Prepare for one write to a storage by code that is no operator.
        method<functions::to_storage<&Sources::about_to_write_unseen>>("about_to_write_unseen"),
        // Keep values that were computed from a storage, because the program has raised the version
        // of its tensors.
        method<functions::to_storage<&Sources::version_raised>>("version_raised"),
        method<functions::bring_back>("bring_back"),
        method<watch_set_data>("watch_set_data"),
        method<functions::pin_exposed_address>("pin_exposed_address"),
        method<functions::suspend_origin_tracking>("suspend_origin_tracking"),
        method<functions::resume_origin_tracking>("resume_origin_tracking"),
        PyMethodDef{},
    };
    return all.data();
}

}  // namespace rekindle
