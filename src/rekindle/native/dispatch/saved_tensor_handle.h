// The saved-tensor hooks object that autograd holds instead of a saved tensor (R1, ownership; R7,
// version check).
//
// NOTE [One saved tensor's way through the core]
//
// 1. An operator saves a tensor. `SavedVariable` asks the default engine for hooks, and our `Proxy`
//    (dispatch/proxy.cpp) returns a new `SavedTensorHandle`.
// 2. `call_pack_hook` looks up the record of the tensor's storage. It notes the geometry (sizes,
//    strides, offset, dtype) and the version of the tensor, and adds a reference to the record.
//    Autograd keeps the handle, not the tensor, so the runtime alone decides when the memory is
//    freed.
// 3. When memory is short, the engine evicts the storage. The handle does not change.
// 4. The backward pass calls `call_unpack_hook`. It checks the version (R7, version check) and
//    makes the record resident (memory/room/room.cpp), which may recompute the value by its
//    recipe (memory/records/recipe.cpp). Then it builds a tensor with the noted geometry.
// 5. Autograd destroys the handle with the graph. The destructor only enqueues the record; the
//    session releases the reference before the next operator.
//
// While operators are only counted (memory/room/only_counting.h), steps 2 and 4 are shorter: the
// handle itself holds the storage, which has no record. If a handle is unpacked after that mode has
// ended, it first gets a record (`track`).
//
// Tensors that cannot be rebuilt from a storage and a geometry, such as subclasses, stay in memory:
// the handle holds them in `kept_`.
#pragma once

#include <c10/core/impl/SizesAndStrides.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>
#include <optional>
#include <utility>

#include "../base/slab.h"
#include "../memory/session.h"

namespace rekindle {

// Autograd's reference to one saved tensor: the record of its storage, and its geometry. The
// destructor only puts the record into a queue for release, because it may run in any thread and
// under any lock. A training step makes and destroys thousands of handles, so they come from a
// pool.
class SavedTensorHandle final : public torch::autograd::SavedVariableHooks,
                                public Pooled<SavedTensorHandle> {
public:
    explicit SavedTensorHandle(c10::intrusive_ptr<Session> session)
        : session_(std::move(session)) {}

    SavedTensorHandle(const SavedTensorHandle&) = delete;
    SavedTensorHandle& operator=(const SavedTensorHandle&) = delete;
    SavedTensorHandle(SavedTensorHandle&&) = delete;
    SavedTensorHandle& operator=(SavedTensorHandle&&) = delete;
    ~SavedTensorHandle() override;

    void call_pack_hook(const at::Tensor& tensor) override;
    at::Tensor call_unpack_hook() override;
    // Return a Python function that unpacks the saved tensor, and the function's argument. Compiled
    // autograd calls the function when it needs the value.
    std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>>
    retrieve_unpack_hook_data() const override;

private:
    std::unique_ptr<SavedTensorHandle> another() const;
    bool pack(const c10::TensorImpl& tensor, bool by_its_own_node);
    void keep_as_it_is(const at::Tensor& tensor);
    void note_tensor(const c10::TensorImpl& tensor, bool by_its_own_node);
    void refer_to(Session& session, StorageRecord& record, const c10::TensorImpl& tensor);
    void track(Session& session, Locked& lock);
    at::Tensor unpack_counted() const;
    void check_version(const char* maker) const;
    [[noreturn]] void refuse_modified(const char* maker) const;
    at::Tensor moved(c10::function_ref<bool(const c10::StorageImpl&)> is_saved) const;
    at::Tensor saved_now() const;
    at::Tensor own_tensor() const;
    std::int64_t bytes_reached() const;
    at::Tensor in(const StoragePtr& storage_impl) const;

    c10::intrusive_ptr<Session> session_;
    // storage record of the saved tensor, counted as a reference; null: the tensor is in `kept_`
    StorageRecord* record_ = nullptr;
    c10::impl::SizesAndStrides geometry_;
    std::int64_t offset_ = 0;  // storage offset of the saved tensor, in elements
    caffe2::TypeMeta dtype_;
    c10::DispatchKeySet keys_;
    Version version_;  // version counter of the saved tensor, and the version when it was saved
    // Weak pointer to the tensor that the program saved. Null if the node that made the tensor
    // saved it.
    WeakTensor saved_ = no_tensor();
    // The saved tensor itself, if it cannot be rebuilt from a storage and a geometry, or has Python
    // attributes.
    at::Tensor kept_;
    // The storage of the saved tensor, if it was saved while operators were only counted; else
    // null. The storage then has no reference of autograd, and `record_` is null.
    StoragePtr storage_;
};

}  // namespace rekindle
