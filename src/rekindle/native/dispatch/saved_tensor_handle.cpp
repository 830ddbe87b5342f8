// Saving and restoring tensors for autograd; see the note in saved_tensor_handle.h.
#include "saved_tensor_handle.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "../memory/deferred_releases.h"
#include "../memory/evict_held_last.h"
#include "../memory/notify.h"
#include "../memory/take_snapshot.h"
#include "../torch/geometry.h"
#include "../torch/pyobjects.h"
#include "../torch/storage_ptr.h"
#include "in_place.h"

namespace rekindle {

namespace {

at::Tensor tensor_of(c10::intrusive_ptr<c10::TensorImpl> impl) {
    return at::Tensor(std::move(impl));
}

// Return true if the autograd node that saves `tensor` also made it. Then the node of `tensor` is
// the newest node of this thread: a node that saves the result of an older node is newer itself.
bool is_result_of_newest_node(const at::Tensor& tensor) {
    const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
    const torch::autograd::Node* node = meta == nullptr ? nullptr : meta->grad_fn_.get();
    return node != nullptr && node->sequence_nr() + 1 == at::sequence_number::peek() &&
           node->thread_id() == at::RecordFunction::currentThreadId();
}

// Return true if `tensor` is a value without room (NOTE [Values without room]) that does not fit
// into the budget now.
bool is_without_room(Session& session, const c10::TensorImpl& tensor) {
    if (session.registry.placeholders == 0 || !has_memory(tensor)) [[likely]] {
        return false;
    }
    const StorageRecord* record = session.registry.find_record(tensor);
    return record != nullptr && session.room.is_without_room(*record);
}

// Return the empty storage by which the program refers to `record`, a value without room.
StoragePtr placeholder_of(Session& session, StorageRecord& record) {
    StoragePtr storage_impl = record.at();
    if (!storage_impl) {
        storage_impl = session.registry.make_placeholder_of(record);
    }
    if (!record.held) {
        session.events.perform([&] { session.engine.hold(record); });
        session.registry.held_list.add(record);
    }
    return storage_impl;
}

}  // namespace

SavedTensorHandle::~SavedTensorHandle() {
    if (record_ != nullptr) {
        session_->registry.free_queue.released(*record_);
        if (session_->registry.free_queue.late.load(std::memory_order_relaxed)) {
            process_pending_late();
        }
    }
    release_without_waiting(std::move(session_));
}

void SavedTensorHandle::call_pack_hook(const at::Tensor& tensor) {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    if (!impl.requires_grad() && !tensor.is_view() && has_attributes(impl)) {
        // The tensor has no autograd graph, so keeping a reference to it makes no reference cycle.
        kept_ = tensor;
    }
    const bool by_its_own_node = is_result_of_newest_node(tensor);
    const bool plain = is_plain(impl) && is_plain_object(impl);
    if (session_->events.only_counting.on() && !kept_.defined() && plain) {
        storage_ = storage_of(impl);
        note_tensor(impl, by_its_own_node);
        const Locked lock;
        session_->registry.note_saved(*storage_);
        return;
    }
    const bool packed = plain && !session_->device.is_capturing() &&
                        translate_errors(*session_, [&] { return pack(impl, by_its_own_node); });
    if (!packed) {
        keep_as_it_is(tensor);
    }
    notify(*session_);
}

// Look up the storage record of `tensor`, and add a reference of autograd to it. Return false if
// `tensor` has no memory.
bool SavedTensorHandle::pack(const c10::TensorImpl& tensor, bool by_its_own_node) {
    Locked lock;
    Session& session = *session_;
    session.observers.due.owners_due |= session.observers.due.models_due;
    session.frees.process_pending_if_needed();
    if (!is_without_room(session, tensor)) [[likely]] {
        bring_back(session, lock, tensor);
    }
    StorageRecord* record = find_or_register(session, lock, tensor);
    if (record == nullptr) {
        return false;
    }
    if ((record->flags & (UNWRITTEN | ZEROED)) != 0) [[unlikely]] {
        session.room.seal(*record);
        record->clear_flags();
    }
    refer_to(session, *record, tensor);
    note_tensor(tensor, by_its_own_node);
    return true;
}

// Add a reference of autograd to `record`, the record of `tensor`.
void SavedTensorHandle::refer_to(
    Session& session, StorageRecord& record, const c10::TensorImpl& tensor
) {
    session.storages.retain(record, storage_of(tensor));
    record_ = &record;
    session.sources.note_shared_version_counter(tensor);
    record.find_version_counter(tensor);
    if (record.version.expected < 0) {
        record.version.look();
    }
}

// Note the geometry and the version of `tensor`.
void SavedTensorHandle::note_tensor(const c10::TensorImpl& tensor, bool by_its_own_node) {
    geometry_.set_sizes(tensor.sizes());
    geometry_.set_strides(tensor.strides());
    offset_ = tensor.storage_offset();
    dtype_ = tensor.dtype();
    keys_ = tensor.key_set();
    version_.counter = tensor.version_counter();
    version_.look();
    if (!by_its_own_node) {
        saved_ = weak(tensor);
    }
}

// Keep an alias of `tensor` in `kept_`. `tensor` itself refers to the autograd graph, which holds
// this handle: keeping it would make a reference cycle.
void SavedTensorHandle::keep_as_it_is(const at::Tensor& tensor) {
    if (!kept_.defined()) {
        kept_ = detached(tensor);
    }
    version_.counter = kept_.unsafeGetTensorImpl()->version_counter();
    version_.look();
    dtype_ = tensor.dtype();
}

namespace {

// Return true if the backward node that is running is one of PyTorch's own, which read saved
// tensors by operators only. Names of generated nodes end in a digit, such as `MulBackward0`. A
// node of the program may launch kernels of its own on any stream.
bool is_read_by_operators() {
    const auto node = torch::autograd::get_current_node();
    if (!node) {
        return false;
    }
    const std::string name = node->name();
    return !name.empty() && name.back() >= '0' && name.back() <= '9';
}

// Restore the saved value `record`, and do not evict it while the running backward node reads it.
void bring_back_saved(Session& session, Locked& lock, StorageRecord& record) {
    if (record.resident) {
        session.room.use(record);
    } else if (session.device.is_capturing()) {
        throw RecomputeDuringCaptureError(record.site());
    } else {
        retry_evicting_held(session, lock, [&] { session.room.use(record); });
    }
    if (session.held.eviction) [[unlikely]] {
        session.held.eviction->pin_while_held(record);
    }
    if (session.device.streams.are_several() && !session.device.is_capturing()) {
        if (const StoragePtr storage_impl = record.at()) {
            session.device.about_to_read(*storage_impl, record.id, session.device.see());
            if (session.device.streams.order_of(record.id).again && !is_read_by_operators()) {
                session.device.hand_to_any_stream(*storage_impl);
            }
        }
    }
}

// Do the same, but return false if `record` has no room, and operators can read it in slices.
bool bring_back_if_it_fits(Session& session, Locked& lock, StorageRecord& record) {
    if (record.resident) [[likely]] {
        bring_back_saved(session, lock, record);
        return true;
    }
    if (session.room.is_without_room(record)) {
        return false;
    }
    const std::optional<OutOfBudgetError> shortage =
        out_of_budget_of([&] { bring_back_saved(session, lock, record); });
    if (shortage) {
        const Recipe& recipe = recipe_of(*record.root.call);
        if (!session.may_slice() || !(recipe.sliced() || can_run_in_slices(recipe))) {
            throw OutOfBudgetError(*shortage);
        }
    }
    return !shortage;
}

void about_to_unpack(Session& session) {
    note_backward_pass(session);
    if (!session.device.is_capturing()) {
        session.frees.process_pending_if_needed();
        if (session.events.tests.evict_before_every_op) [[unlikely]] {
            session.room.evict_all();
        }
    }
}

}  // namespace

at::Tensor SavedTensorHandle::call_unpack_hook() {
    const auto node = torch::autograd::get_current_node();
    if (storage_ && session_->events.only_counting.on()) {
        at::Tensor found = unpack_counted();
        note_unpacked(node.get(), found);
        return found;
    }
    if (record_ == nullptr && !storage_) [[unlikely]] {
        check_version("a tensor");
        note_unpacked(node.get(), kept_);
        return kept_;
    }
    at::Tensor found = translate_errors(*session_, [&] {
        Locked lock;
        Session& session = *session_;
        about_to_unpack(session);
        if (storage_) [[unlikely]] {
            track(session, lock);
        }
        if (record_ == nullptr) [[unlikely]] {  // a storage without bytes has no record
            check_version("a tensor");
            return kept_;
        }
        check_version(record_->site());
        at::Tensor elsewhere =
            moved([&](const c10::StorageImpl& there) { return current(*record_).is_in(there); });
        if (elsewhere.defined()) [[unlikely]] {
            return elsewhere;
        }
        if (StorageRecord& record = current(*record_);
            record.replayable || !record.held || record.evictable_while_held) {
            session.observers.unpacked.add(node.get(), record.id);
            if (!bring_back_if_it_fits(session, lock, record)) [[unlikely]] {
                return in(placeholder_of(session, record));
            }
        }
        if (kept_.defined()) [[unlikely]] {
            return kept_;
        }
        if (at::Tensor own = own_tensor(); own.defined()) [[unlikely]] {
            return own;
        }
        const StoragePtr storage_impl =
            // another thread may have written the value meanwhile, so use its newest version
            current(*record_).at();
        TORCH_CHECK(storage_impl, "a value that should be in memory is not; please report this");
        return in(storage_impl);
    });
    notify(*session_);
    note_unpacked(node.get(), found);
    return found;
}

// Return the saved tensor while operators are only counted: nothing is evicted.
at::Tensor SavedTensorHandle::unpack_counted() const {
    check_version("a tensor");
    at::Tensor elsewhere =
        moved([&](const c10::StorageImpl& there) { return &there == storage_.get(); });
    if (elsewhere.defined()) {
        return elsewhere;
    }
    const at::Tensor own = own_tensor();
    return own.defined() ? own : in(storage_);
}

// Refer to the saved tensor by a record. The mode in which operators are only counted has ended, so
// its storage may have been evicted for a value that was written there later.
void SavedTensorHandle::track(Session& session, Locked& lock) {
    retry_evicting_held(session, lock, [&] { session.room.bring_back(*storage_); });
    const at::Tensor saved = in(std::exchange(storage_, StoragePtr()));
    const c10::TensorImpl& tensor = *saved.unsafeGetTensorImpl();
    StorageRecord* record = find_or_register(session, lock, tensor);
    if (record == nullptr) {
        kept_ = saved;
        return;
    }
    refer_to(session, *record, tensor);
}

// Return another saved-tensor handle for the same tensor.
std::unique_ptr<SavedTensorHandle> SavedTensorHandle::another() const {
    auto made = std::make_unique<SavedTensorHandle>(session_);
    if (record_ != nullptr) {
        const Locked lock;
        session_->engine.retain(current(*record_));
        hold(static_cast<Storage&>(*record_));
        made->record_ = record_;
    }
    made->geometry_ = geometry_;
    made->offset_ = offset_;
    made->dtype_ = dtype_;
    made->keys_ = keys_;
    made->version_ = version_;
    made->saved_ = saved_;
    made->kept_ = kept_;
    made->storage_ = storage_;
    return made;
}

std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>>
SavedTensorHandle::retrieve_unpack_hook_data() const {
    return unpacked_by_python(another());
}

// Raise PyTorch's error if the saved tensor was modified. Autograd skips its own check when
// saved-tensor hooks are active (R7, version check).
void SavedTensorHandle::check_version(const char* maker) const {
    if (version_.moved()) [[unlikely]] {
        refuse_modified(maker);
    }
}

void SavedTensorHandle::refuse_modified(const char* maker) const {
    const auto name = c10::getDtypeNames(c10::typeMetaToScalarType(dtype_)).first;
    std::ostringstream sizes;
    if (!kept_.defined()) {
        sizes << geometry_.sizes_arrayref();
    } else if (kept_.is_nested()) {
        sizes << kept_._nested_tensor_size();
    } else {
        sizes << kept_.sizes();
    }
    TORCH_CHECK(
        false,
        "one of the variables needed for gradient computation has been modified by an inplace "
        "operation: [torch.",
        name,
        " ",
        sizes.str(),
        "], which is output of ",
        maker,
        ", is at version ",
        version_.now(),
        "; expected version ",
        version_.expected,
        " instead. Hint: enable anomaly detection to find the operation that failed to compute its "
        "gradient, with torch.autograd.set_detect_anomaly(True)."
    );
}

// If the program gave the saved tensor other memory (`tensor.data = ...`), return a tensor with its
// current contents. Plain PyTorch also computes with the current contents, unless the node that
// made the tensor saved it.
// is_saved: tells whether a storage is the one that was saved.
at::Tensor SavedTensorHandle::moved(
    c10::function_ref<bool(const c10::StorageImpl&)> is_saved
) const {
    const at::Tensor now = saved_now();
    if (!now.defined() || !now.has_storage()) {
        return {};
    }
    const c10::TensorImpl& tensor = *now.unsafeGetTensorImpl();
    if (is_saved(*tensor.unsafe_storage().unsafeGetStorageImpl())) {
        return {};  // the tensor still has the memory that was saved
    }
    return alias_of(tensor);
}

// Return the tensor that the program saved or, if it is dead and got other memory before, a tensor
// with that memory.
at::Tensor SavedTensorHandle::saved_now() const {
    if (auto tensor = saved_.lock()) {
        return tensor_of(std::move(tensor));
    }
    if (!session_->registry.moved_tensors.any()) [[likely]] {
        return {};
    }
    const auto lock = locked_if_not_mine();
    return session_->registry.moved_tensors.find(saved_._unsafe_get_target());
}

// Return the tensor that the program saved, if it is alive and unchanged. Autograd uses this tensor
// only if it requires no gradient; otherwise autograd makes a new tensor, which hooks of the
// program do not see.
at::Tensor SavedTensorHandle::own_tensor() const {
    const auto tensor = saved_.lock();
    const bool same = tensor && !tensor->requires_grad() && tensor->key_set() == keys_ &&
                      tensor->dtype() == dtype_ && tensor->storage_offset() == offset_ &&
                      tensor->sizes() == geometry_.sizes_arrayref() &&
                      tensor->strides() == geometry_.strides_arrayref();
    return same ? tensor_of(tensor) : at::Tensor();
}

// Return how many bytes the saved tensor spans in its storage, from the storage's start; 0 for a
// tensor without elements.
std::int64_t SavedTensorHandle::bytes_reached() const {
    std::int64_t last = offset_;
    for (std::size_t i = 0; i < geometry_.size(); ++i) {
        const std::int64_t size = geometry_.size_at_unchecked(i);
        if (size == 0) {
            return 0;
        }
        last += (size - 1) * geometry_.stride_at_unchecked(i);
    }
    return (last + 1) * static_cast<std::int64_t>(dtype_.itemsize());
}

at::Tensor SavedTensorHandle::in(const StoragePtr& storage_impl) const {
    const std::int64_t reach = bytes_reached();
    TORCH_CHECK(
        std::cmp_less_equal(reach, storage_impl->nbytes()),
        "a tensor that autograd saved for the backward pass was shrunk: its storage was resized "
        "to ",
        storage_impl->nbytes(),
        " bytes, and ",
        reach,
        " are needed"
    );
    // The tensor was saved outside inference mode, so rebuild it outside: a backward pass may run
    // in inference mode.
    std::optional<c10::InferenceMode> as_saved;
    if (c10::InferenceMode::is_enabled()) [[unlikely]] {
        as_saved.emplace(false);
    }
    at::Tensor made =
        at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage_impl), keys_, dtype_);
    c10::TensorImpl& impl = *made.unsafeGetTensorImpl();
    impl.set_sizes_and_strides(geometry_.sizes_arrayref(), geometry_.strides_arrayref(), offset_);
    // Let the unpacked tensor share the version counter of the saved one. So other nodes that saved
    // the tensor notice a write to the unpacked one.
    if (version_.counter.enabled()) {
        impl.set_version_counter(version_.counter);
    }
    return made;
}

}  // namespace rekindle
