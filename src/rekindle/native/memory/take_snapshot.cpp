#include "take_snapshot.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <utility>

#include "../allocator/arena.h"
#include "../ops/signature.h"
#include "../torch/geometry.h"
#include "../torch/pyobjects.h"
#include "../torch/storage_ptr.h"

namespace rekindle {

namespace {

// Return true if no Python variable holds the memory of `record`: only a tensor that an operator
// made for its own backward pass refers to it, such as the reserve space of an LSTM.
bool is_internal(const StorageRecord& record) {
    const auto origin = record.origin.lock();
    const StoragePtr storage_impl = record.at();
    const std::size_t ours = record.keeper ? 2 : 1;
    return origin && storage_impl && object_of(*origin) == nullptr &&
           storage_impl.use_count() <= ours + 1;
}

// Return true if only the saved tensor that autograd unpacked refers to the memory.
bool has_one_tensor_without_origin(const StorageRecord& record) {
    const StoragePtr storage_impl = record.at();
    const std::size_t ours = record.keeper ? 2 : 1;
    return record.origin.expired() && storage_impl && storage_impl.use_count() <= ours + 1;
}

// Return the flags that describe `record` in a memory snapshot (constants of `Holder`). `unpacked`
// tells which saved values the running backward node has unpacked.
int flags_of(const StorageRecord& record, const UnpackedByNode& unpacked) {
    int flags = record.replayable ? Holder::REPLAYABLE : 0;
    flags |= record.pinned ? Holder::PINNED : 0;
    const bool saved = record.references != 0;
    flags |= record.is_held() && !(saved && is_internal(record)) ? Holder::HELD : 0;
    flags |= saved ? Holder::REFERENCED : 0;
    const auto node = torch::autograd::get_current_node();
    if (unpacked.has(node.get(), record.id) && has_one_tensor_without_origin(record)) {
        flags |= Holder::UNPACKED;
    }
    flags |= record.consumed() ? Holder::CONSUMED : 0;
    if (const auto origin = record.origin.lock()) {
        flags |= is_named(*origin) ? Holder::NAMED : Holder::UNNAMED;
    }
    return flags;
}

// Return true if the memory was allocated since the running backward pass began.
bool made_in_pass(const AddressEntry& entry, const UnpackedByNode& unpacked) {
    return unpacked.made_in(torch::autograd::get_current_graph_task_id(), entry.allocation);
}

// Return the id of the first operator call that made the value of `record`, or -1.
OpId maker_of(StorageRecord& record) {
    OpId maker = -1;
    each_maker(record, [&](const Call& call) { maker = maker < 0 ? call.id : maker; });
    return maker;
}

// Return the number of the allocation that holds the contents of `tensor`, or 0.
AllocationId allocation_of(Session& session, const c10::TensorImpl& tensor) {
    if (!has_memory(tensor)) {
        return 0;
    }
    const AddressEntry* found = session.registry.find(tensor);
    return found == nullptr ? 0 : found->allocation;
}

}  // namespace

void note_backward_pass(Session& session) {
    const int pass = torch::autograd::get_current_graph_task_id();
    session.observers.unpacked.runs(pass, session.registry.table.newest());
}

void add_owned(
    Session& session,
    Snapshot& snapshot,
    const c10::TensorImpl& tensor,
    Owned::Kind kind,
    const void* parameter
) {
    if (const AllocationId allocation = allocation_of(session, tensor); allocation != 0) {
        snapshot.owned.push_back({allocation, kind, parameter});
    }
}

namespace {

// Write into `snapshot` which allocation is the gradient of the leaf tensor `leaf`.
void add_gradient(Session& session, Snapshot& snapshot, const at::Tensor& leaf) {
    const at::Tensor& gradient = leaf.grad();
    if (gradient.defined()) {
        const c10::TensorImpl& found = *gradient.unsafeGetTensorImpl();
        add_owned(
            session, snapshot, found, Owned::Kind::gradient, object_of(*leaf.unsafeGetTensorImpl())
        );
    }
}

// Write into `snapshot` which allocations are parameters of modules, buffers, and gradients of
// parameters.
void add_tensors_of_modules(Session& session, Snapshot& snapshot) {
    session.observers.module_tensors.each([&](const at::Tensor& tensor, bool parameter) {
        const c10::TensorImpl& found = *tensor.unsafeGetTensorImpl();
        if (!parameter) {
            add_owned(session, snapshot, found, Owned::Kind::buffer, nullptr);
            return;
        }
        add_owned(session, snapshot, found, Owned::Kind::parameter, object_of(found));
        if (tensor.is_leaf()) {
            add_gradient(session, snapshot, tensor);
        }
    });
}

// Add `record`, a storage that is in memory, to `snapshot`.
void add_storage(Session& session, Snapshot& snapshot, StorageRecord& record) {
    int flags = flags_of(record, session.observers.unpacked);
    const void* parameter = nullptr;
    if (record.parameter) {
        if (const at::Tensor origin(record.origin.lock()); origin.defined()) {
            flags |= Holder::PARAMETER;
            parameter = object_of(*origin.unsafeGetTensorImpl());
            add_gradient(session, snapshot, origin);
        }
    }
    const AddressEntry* found =
        record.address == nullptr ? nullptr : session.registry.table.find(record.address);
    const bool is_new = found != nullptr && made_in_pass(*found, session.observers.unpacked);
    flags |= is_new ? Holder::BACKWARD : 0;
    snapshot.holders.push_back({
        record.nbytes,
        found == nullptr ? 0 : found->allocation,
        flags,
        record.site(),
        parameter,
        record.id,
        maker_of(record),
    });
}

}  // namespace

void take_snapshot(Session& session, Snapshot& snapshot, ProgramLine line) {
    session.frees.process_pending();
    snapshot.memory = session.engine.memory;
    snapshot.clock = session.engine.clock;
    snapshot.line = std::move(line);
    snapshot.holders.clear();
    snapshot.owned.clear();
    snapshot.has_states = false;
    // If another thread may free a gradient while this thread reads it, leave gradients out.
    if (!gradients_stay()) {
        return;
    }
    add_tensors_of_modules(session, snapshot);
    for (Storage* each = session.engine.first_storage(); each != nullptr; each = each->next) {
        if (each->resident && each->nbytes != 0) {
            add_storage(session, snapshot, record_of(*each));
        }
    }
    session.registry.table.each_counted([&](const void* /*address*/, const AddressEntry& counted) {
        const int flags =
            Holder::COUNTED | (counted.saved ? Holder::REFERENCED : 0) |
            (made_in_pass(counted, session.observers.unpacked) ? Holder::BACKWARD : 0);
        const char* site = counted.maker == nullptr ? "" : counted.maker->name.c_str();
        const AllocationId allocation = counted.allocation;
        snapshot.holders.push_back({counted.nbytes, allocation, flags, site, nullptr, -1, -1});
    });
}

void take_peak_snapshot(Session& session, ProgramLine line) {
    session.observers.peak_watch.due = false;
    session.frees.process_pending();
    if (!session.observers.peak_watch.is_outdated(session.engine.memory)) {
        return;  // the program freed values that were part of the peak
    }
    take_snapshot(session, session.observers.peak_watch.snapshot, std::move(line));
    if (!session.device.queues()) {
        session.observers.peak_watch.snapshot.resident = resident_bytes();
        session.observers.peak_watch.snapshot.cached = the_arena().cached();
    }
    session.observers.peak_watch.taken(session.engine.memory);
}

void expect_peak(Session& session, Bytes nbytes, ProgramLine line) {
    session.observers.peak_watch.expect(nbytes);
    take_peak_snapshot(session, std::move(line));
}

Bytes evicted_bytes(const Session& session) {
    Bytes total = 0;
    for (const Storage* each = session.engine.first_storage(); each != nullptr; each = each->next) {
        const bool wanted = !each->dead() || static_cast<const StorageRecord*>(each)->placeholder;
        total += !each->resident && wanted ? each->nbytes : 0;
    }
    return total;
}

std::vector<at::Tensor> program_tensors(Session& session) {
    session.frees.process_pending();
    std::vector<at::Tensor> found;
    for (Storage* each = session.engine.first_storage(); each != nullptr; each = each->next) {
        if (at::Tensor origin(record_of(*each).origin.lock()); each->resident && origin.defined()) {
            found.push_back(std::move(origin));
        }
    }
    return found;
}

}  // namespace rekindle
