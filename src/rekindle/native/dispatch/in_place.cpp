#include "in_place.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "../memory/records/storage_record.h"
#include "../torch/geometry.h"
#include "../torch/storage_ptr.h"
#include "../torch/versions.h"

namespace rekindle {

namespace {

// Reference count of an incoming gradient that only its autograd node uses, while an operator of
// the node runs. The reference is `grads` of the node's `apply`, into which autograd's engine moved
// the gradient. If the operator's arguments are boxed, the boxed argument is one reference more.
// tests/pytorch/online/test_in_place.py counts them.
constexpr std::size_t REFERENCES = 1;

// The saved tensor that autograd unpacked last on this thread, and the backward node that saved it.
struct Unpacked final {
    const void* node = nullptr;
    const c10::StorageImpl* storage_impl = nullptr;
};

Unpacked& unpacked() noexcept {
    thread_local Unpacked last;
    return last;
}

// Return the storage of `tensor`, or null if it has none.
const c10::StorageImpl* storage_or_null(const at::Tensor& tensor) noexcept {
    const bool has = tensor.defined() && has_memory(*tensor.unsafeGetTensorImpl());
    return has ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

bool has_no_hooks(torch::autograd::Node& node) {
    return node.pre_hooks().empty() && node.tensor_pre_hooks().empty() &&
           node.retains_grad_hooks().empty() && node.post_hooks().empty();
}

template <class Node>
bool unpacks_without_hooks(const torch::autograd::Node& node) {
    const auto* found = dynamic_cast<const Node*>(&node);
    return found != nullptr && !found->other_.has_hooks();
}

// Return true if `node` multiplies or divides by a tensor that autograd saved without saved-tensor
// hooks. Autograd saves Python numbers that way.
bool unpacks_without_hooks(const torch::autograd::Node& node) {
    return unpacks_without_hooks<torch::autograd::generated::MulBackward0>(node) ||
           unpacks_without_hooks<torch::autograd::generated::DivBackward0>(node);
}

// Return true if the name of `node` is one of those in `entry`. All nodes of a type that PyTorch
// generates have the same name, so names of such a type are compared once in a row.
bool is_listed(const torch::autograd::Node& node, const InPlace& entry) {
    const std::type_info& type = typeid(node);
    if (entry.last_type != &type) {
        const bool listed = std::ranges::find(entry.nodes, node.name()) != entry.nodes.end();
        if (!std::string_view(type.name()).starts_with("N5torch8autograd9generated")) {
            return listed;
        }
        entry.last_type = &type;
        entry.last_is_listed = listed;
    }
    return entry.last_is_listed;
}

// Return true if `node` computes the gradient of its first input by the operator of `entry` alone,
// and no other input requires a gradient. Then this operator is the last use of the incoming
// gradient, so it may write over it.
bool ends_formula(torch::autograd::Node& node, const InPlace& entry) {
    return is_listed(node, entry) && only_first_leads_on(node) && has_no_hooks(node);
}

// Return true if the backward node `node` makes this operator call, not other code on this thread.
// (Other code may be a C++ function in a forward pass that checkpointing runs again.) The node
// makes the call if an argument is `last`, the tensor that this node unpacked on this thread, and
// no other operator ran since. A node that multiplies or divides by a Python number unpacks that
// number without hooks, so it always counts as the caller.
bool is_called_by(
    const torch::autograd::Node& node, const Unpacked& last, std::span<const Operand> given
) {
    const auto is_unpacked = [&](const Operand& operand) {
        return operand.tensor != nullptr && storage_or_null(*operand.tensor) == last.storage_impl;
    };
    return (last.node == &node && last.storage_impl != nullptr &&
            std::ranges::any_of(given.subspan(1), is_unpacked)) ||
           unpacks_without_hooks(node);
}

// -- the gradient and the other arguments ---------------------------------------------------------

// Return true if `tensor` has the strides that a new contiguous tensor of its sizes would have.
bool has_contiguous_strides(const c10::TensorImpl& tensor) {
    std::int64_t expected = 1;
    for (std::int64_t i = tensor.dim() - 1; i >= 0; --i) {
        if (tensor.stride(i) != expected) {
            return false;
        }
        expected *= tensor.size(i);
    }
    return true;
}

// Return true if a newly allocated result would have the strides of `gradient` and fill as many
// bytes as the storage of `gradient`. Only then can the result be written over the gradient.
bool has_geometry_of_result(const c10::TensorImpl& gradient, bool pointwise) {
    const auto one = [](std::int64_t size) { return size == 1; };
    const bool dense = pointwise && gradient.is_non_overlapping_and_dense() &&
                       std::ranges::none_of(gradient.sizes(), one);
    const auto nbytes = static_cast<std::size_t>(gradient.numel()) * gradient.itemsize();
    return nbytes != 0 && gradient.storage_offset() == 0 &&
           (dense || has_contiguous_strides(gradient)) &&
           gradient.unsafe_storage().nbytes() == nbytes;
}

bool has_tangent(const at::Tensor& tensor) {
    return tensor._fw_grad(0).defined();
}

// Return true if the operand `tensor` gives the result the dtype, sizes and strides of `gradient`:
// `tensor` has the same ones, or is a real scalar.
bool keeps_geometry(const at::Tensor& tensor, const at::Tensor& gradient) {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    if (impl.dim() == 0 && gradient.dim() != 0) {
        return is_plain(impl) && !tensor.is_complex() && !has_tangent(tensor);
    }
    return is_plain(impl) && !impl.is_conj() && !impl.is_neg() && !has_tangent(tensor) &&
           impl.dtype() == gradient.dtype() && impl.device() == gradient.device() &&
           impl.sizes() == gradient.sizes() && impl.strides() == gradient.strides() &&
           storage_or_null(tensor) != storage_or_null(gradient);
}

// Return true if all operands except the gradient give the result the gradient's dtype, sizes and
// strides, so that the result can be written over the gradient.
bool operands_keep_geometry(const Facts& facts, std::span<const Operand> given) {
    const at::Tensor& gradient = *given[0].tensor;
    const auto dtype = static_cast<std::int64_t>(gradient.scalar_type());
    for (std::size_t i = 1; i < given.size(); ++i) {
        const Operand& operand = given[i];
        const bool fits = operand.tensor != nullptr ? operand.tensor->defined() &&
                                                          keeps_geometry(*operand.tensor, gradient)
                                                    : operand.kind != Operand::Kind::composite;
        if (!fits || (std::cmp_equal(facts.dtype, i) &&
                      (operand.kind != Operand::Kind::integer || operand.integer != dtype))) {
            return false;
        }
    }
    return true;
}

// -- owners of the gradient -----------------------------------------------------------------------

// Return true if `record` is a source that moved to the host, or was there. Before an operator
// writes it, it is brought back, and its copy is discarded (`Events::about_to_write`).
bool has_moved(const StorageRecord& record) noexcept {
    return record.on_host && !record.replayable;
}

// Return true if a recipe, autograd, the swapper or a running kernel may still read the value of
// `record`. Then the value must not be overwritten.
bool may_be_read(const StorageRecord& record) noexcept {
    const bool elsewhere = record.on_host || record.placeholder;
    return record.consumed() || record.references != 0 || record.pinned ||
           record.special.is_external() || record.flags != 0 || record.leaving ||
           (elsewhere && !has_moved(record)) || record.shares_version_counter || record.keeper ||
           record.successor || record.locks != 0 || record.read_unseen;
}

// Return true if `tensor` has exactly `references` references, no Python object, and no weak
// reference except the one in `record`.
bool has_only(const at::Tensor& tensor, std::size_t references, const StorageRecord* record) {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    const std::size_t ours =
        record != nullptr && record->origin._unsafe_get_target() == impl ? 1 : 0;
    return tensor.use_count() == references && tensor.weak_use_count() == 1 + ours &&
           impl->pyobj_slot()->load_pyobj() == nullptr;
}

// Return true if only `gradient` refers to its storage, or if only `gradient` and its base do and
// the base has no other view. Then nothing else sees a write to this storage.
bool is_only_owner(const at::Tensor& gradient, const StorageRecord* record) {
    const c10::StorageImpl* storage_impl = storage_or_null(gradient);
    const auto* view = torch::autograd::impl::get_view_autograd_meta(gradient);
    if (view == nullptr) {
        return gradient.storage().use_count() == 1;
    }
    if (!view->has_bw_view() || (view->has_fw_view() && !view->shared_view_info())) {
        return false;
    }
    const auto& info = view->get_backward_view();
    const at::Tensor& base = info.base_;
    return !info.has_view_fn() && storage_or_null(base) == storage_impl && !base.requires_grad() &&
           has_only(base, 1, record) && gradient.storage().use_count() == 2;
}

// Return true if nothing but `gradient`, which must have exactly `references` references, owns its
// storage, so that the operator may write over it. The fence orders the reads of earlier owners,
// who have released their references, before this write.
bool is_only_used_here(Session& session, const at::Tensor& gradient, std::size_t references) {
    c10::StorageImpl& storage_impl = *gradient.storage().unsafeGetStorageImpl();
    const AddressEntry* entry = session.registry.find(storage_impl);
    const StorageRecord* record = entry == nullptr ? nullptr : entry->record;
    const bool is_empty = is_placeholder(storage_impl);
    if (entry == nullptr || !storage_impl.resizable() ||
        (is_empty && (record == nullptr || !has_moved(*record))) ||
        storage_impl.pyobj_slot()->load_pyobj() != nullptr ||
        (!is_empty &&
         c10::impl::cow::is_cow_data_ptr(storage_impl._mutable_data_ptr_no_checks()))) {
        return false;
    }
    if (record != nullptr && may_be_read(*record)) {
        return false;
    }
    if (!is_only_owner(gradient, record)) {
        return false;
    }
    const auto autograds =
        static_cast<std::int64_t>(REFERENCES + gradient.use_count() - references);
    session.taking_over.fewest = std::min(session.taking_over.fewest, autograds);
    if (!has_only(gradient, references, record)) {
        return false;
    }
    std::atomic_thread_fence(std::memory_order_acquire);
    return true;
}

// Return true if nothing outside this backward pass, which builds no graph, sees its gradients:
// anomaly detection is off, and no kernel may run on another stream.
bool gradients_are_private(const Session& session) {
    return !c10::InferenceMode::is_enabled() && !torch::autograd::AnomalyMode::is_enabled() &&
           !session.device.streams.are_several() && !session.records_streams;
}

bool may_be_written(const at::Tensor& gradient, bool pointwise) {
    const c10::TensorImpl& impl = *gradient.unsafeGetTensorImpl();
    return gradient.defined() && is_plain(impl) && !impl.is_conj() && !impl.is_neg() &&
           !impl.requires_grad() && !gradient.is_inference() &&
           has_geometry_of_result(impl, pointwise) && !has_tangent(gradient) &&
           gradient.is_floating_point();  // dividing complex numbers in place gives other bits
}

}  // namespace

void note_unpacked(const torch::autograd::Node* node, const at::Tensor& saved) {
    unpacked() = {node, storage_or_null(saved)};
}

void forget_unpacked() noexcept {
    unpacked() = {};
}

bool only_first_leads_on(const torch::autograd::Node& node) {
    const auto leads_on = [](const torch::autograd::Edge& edge) { return edge.is_valid(); };
    const auto& edges = node.next_edges();
    return !edges.empty() && leads_on(edges.front()) && std::ranges::count_if(edges, leads_on) == 1;
}

TakesOver takes_over(Session& session, const Facts& facts, OperatorCall& call) {
    const Unpacked last = std::exchange(unpacked(), {});
    if (!session.taking_over.allowed || !gradients_are_private(session)) {
        return TakesOver::no;
    }
    const Operands given = call.operands(facts.arguments);
    const std::size_t references = REFERENCES + (call.is_boxed() ? 1 : 0);
    if (given[0].tensor == nullptr ||
        (given[0].tensor->use_count() > references && !session.taking_over.predicted) ||
        !may_be_written(*given[0].tensor, call.op.hasTag(at::Tag::pointwise))) {
        return TakesOver::no;
    }
    const NodePointer node = torch::autograd::get_current_node();
    if (!node || !ends_formula(*node, *facts.in_place) || !operands_keep_geometry(facts, given)) {
        return TakesOver::no;
    }
    // If the handler of a dispatch mode makes this call, `any_modes_set` is false although the mode
    // sees the gradient. But then the gradient has a Python object, so `is_only_used_here` returns
    // false.
    if (!c10::impl::TorchDispatchModeTLS::any_modes_set() && is_called_by(*node, last, given) &&
        is_only_used_here(session, *given[0].tensor, references)) {
        return TakesOver::yes;
    }
    return session.taking_over.predicted ? TakesOver::without_modes : TakesOver::no;
}

}  // namespace rekindle
