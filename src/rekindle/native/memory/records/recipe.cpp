#include "recipe.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "../../ops/call_again.h"
#include "../../torch/dispatch_key.h"
#include "../../torch/geometry.h"
#include "../../torch/global_flags.h"
#include "../../torch/private_generators.h"
#include "../../torch/replay_dispatch_guard.h"
#include "../../torch/storage_ptr.h"
#include "../../torch/thread_state.h"
#include "../slices/evaluation.h"
#include "storage_record.h"

namespace rekindle {

namespace {

// Return the storage of `record`, an input of a recomputation. Throw an error if the input is not
// in memory, or if its size or contents have changed since the operator first ran.
StoragePtr input_storage(StorageRecord& record) {
    StoragePtr storage_impl = record.at();
    if (record.special.is_gathered() && !(storage_impl && is_back(record, storage_impl))) {
        const bool freed = storage_impl && storage_impl->nbytes() == 0;
        throw GatheredInputError(record.special.gathered()->size, !freed);
    }
    if (!storage_impl) {
        throw MissingInputError();
    }
    const auto nbytes = static_cast<Bytes>(storage_impl->nbytes());
    if (nbytes != record.size && !record.special.is_gathered()) {
        throw ResizedInputError(nbytes, record.size);
    }
    if (record.special.is_external() && record.special.external()->checksum &&
        *record.special.external()->checksum != checksum_of(*storage_impl)) [[unlikely]] {
        throw ExternalWriteError(record.site());
    }
    if (record.was_modified(storage_impl)) {
        throw ModifiedInputError(record.site(), record.version.now(), record.version.expected);
    }
    return storage_impl;
}

// Return a tensor to pass to a recomputation in place of running statistics, such as those of batch
// norm: an undefined tensor if the operator allows that, else a scratch tensor.
at::Tensor scratch_statistics(const Recipe& recipe, const Geometry& geometry) {
    if (!needs_scratch(*recipe.signature, geometry)) {
        return {};
    }
    const ReplayDispatchGuard guard(false);
    const auto options = at::TensorOptions().dtype(geometry.dtype).device(geometry.device);
    return at::empty_strided(geometry.sizes, geometry.strides, options).zero_();
}

bool is_in(std::span<const std::uint32_t> positions, std::uint32_t position) noexcept {
    return std::ranges::find(positions, position) != positions.end();
}

// Return the storages of all tensor arguments of `recipe`. An entry is null for an argument that a
// recomputation leaves out.
c10::SmallVector<StoragePtr, 4> storages_of(const Recipe& recipe) {
    c10::SmallVector<StoragePtr, 4> storages;
    std::size_t next = 0;
    for (std::uint32_t i = 0; i < recipe.signature->geometries.size(); ++i) {
        const bool dropped = recipe.statistics() && is_in(recipe.written(), i);
        storages.push_back(
            dropped ? StoragePtr() : input_storage(record_of(*recipe.argument(next++).storage))
        );
    }
    return storages;
}

// Replace each storage that the kernel writes by a copy, if a value that is still needed lives in
// that storage. So a recomputation never writes memory that the program can read (R3, in-place
// writes).
void make_private(const Recipe& recipe, c10::SmallVector<StoragePtr, 4>& storages) {
    for (const std::uint32_t position : recipe.written()) {
        const StoragePtr shared = storages[position];
        if (shared.get() != record_of(*recipe.argument(position).storage).at().get()) {
            continue;  // an earlier position had the same storage, which is replaced already
        }
        const StoragePtr made = copy_of(shared);
        for (StoragePtr& each : storages) {
            if (each.get() == shared.get()) {
                each = made;
            }
        }
    }
}

// Return the storages of the outputs of a recomputation. Throw an error if their sizes differ from
// those of the first run.
c10::SmallVector<StoragePtr, 2> output_storages(
    const Recipe& recipe, const torch::jit::Stack& stack
) {
    c10::SmallVector<StoragePtr, 2> made;
    // NOLINTNEXTLINE(bugprone-unchecked-optional-access): the operator has run before
    const std::vector<std::uint32_t>& fresh = *recipe.signature->fresh;
    each_tensor(stack, [&](std::uint32_t position, const at::Tensor& tensor) {
        if (is_in(fresh, position)) {
            made.push_back(StoragePtr::reclaim_copy(tensor.storage().unsafeGetStorageImpl()));
        }
    });
    std::size_t next = 0;
    for (const Value* value : recipe.outputs()) {
        const auto nbytes = next < made.size() ? static_cast<Bytes>(made[next]->nbytes()) : -1;
        const Bytes before = record_of(*value->storage).size;
        if (nbytes != before) {
            throw ChangedSizeError(recipe.facts, nbytes, before);
        }
        ++next;
    }
    return made;
}

}  // namespace

namespace {

// Compute the outputs of `recipe` in slices, which need at most `room` bytes if possible.
c10::SmallVector<StoragePtr, 2> run_in_slices(const Recipe& recipe, Bytes room, Calling calling) {
    // Other threads may change the records while kernels run, but not this memory of theirs.
    c10::SmallVector<StoragePtr, 4> leaves;
    c10::SmallVector<const StorageRecord*, 4> records;
    for (const Edge& edge : recipe.inputs()) {
        records.push_back(&record_of(*edge.value->storage));
        leaves.push_back(input_storage(record_of(*edge.value->storage)));
    }
    c10::SmallVector<StoragePtr, 2> made;
    calling(leaves, [&] {
        const auto leaf = [&](StorageRecord& record) {
            return leaves[std::ranges::find(records, &record) - records.begin()];
        };
        const SlicedCall& sliced = *recipe.sliced();
        std::optional<SlicePlan> plan = plan_of(sliced, room);
        while (made.empty()) {
            if (!plan) {  // no slices have equal bits: rather exceed the budget than lose the value
                const std::vector<StoragePtr> results = compute_whole(sliced, leaf);
                made.append(results.begin(), results.end());
                break;
            }
            try {
                const std::vector<StoragePtr> results = compute_in_slices(sliced, *plan, leaf);
                recipe.aside->slices = slices_of(sliced, *plan);
                made.append(results.begin(), results.end());
            } catch (const UnequalSlices&) {
                if (!recipe.ran && !recipe.aside->is_given) {
                    throw;
                }
                plan = plan_of(sliced, room);
            }
        }
    });
    return made;
}

}  // namespace

bool can_run_in_slices(const Recipe& recipe) {
    return recipe.replayable && recipe.facts != nullptr && recipe.signature && !recipe.sliced() &&
           recipe.n_outputs == 1 && recipe.random().empty() && recipe.written().empty() &&
           !recipe.signature->takes_over && has_slices(*recipe.facts, recipe.signature->op);
}

c10::SmallVector<StoragePtr, 2> run_again(
    const Recipe& recipe, bool in_place, Bytes room, Calling calling
) {
    if (recipe.sliced()) [[unlikely]] {
        return run_in_slices(recipe, room, calling);
    }
    c10::SmallVector<StoragePtr, 4> storages = storages_of(recipe);
    // True if the call writes inputs in place. Without `in_place` it then writes copies of them
    // (R3, in-place writes).
    const bool writes = !recipe.written().empty() && !recipe.statistics();
    if (writes && !in_place) {
        make_private(recipe, storages);
    }
    std::vector<at::Tensor> tensors;
    tensors.reserve(storages.size());
    for (std::size_t i = 0; i < storages.size(); ++i) {
        const Geometry& geometry = recipe.signature->geometries[i];
        tensors.push_back(
            storages[i] ? geometry.in(storages[i]) : scratch_statistics(recipe, geometry)
        );
    }
    const torch::jit::Stack stack = call_again(
        *recipe.signature,
        tensors,
        recipe.unkeyed_args(),
        recipe.random(),
        recipe.grad_mode,
        [&](Kernel kernel) { calling(storages, kernel); }
    );
    if (!writes) {
        return output_storages(recipe, stack);
    }
    c10::SmallVector<StoragePtr, 2> made;
    for (const std::uint32_t position : recipe.written()) {
        made.push_back(storages[position]);
    }
    return made;
}

}  // namespace rekindle
