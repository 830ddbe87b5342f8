#include "recipe.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

#include "../../torch/dispatch_key.h"
#include "../../torch/geometry.h"
#include "../../torch/global_flags.h"
#include "../../torch/private_generators.h"
#include "../../torch/replay_dispatch_guard.h"
#include "../../torch/storage_ptr.h"
#include "../../torch/thread_state.h"
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
    if (recipe.facts->written == 0) {
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

std::int64_t flags_of(const Signature& signature) {
    // The default dtype is that of results of integers and Python numbers, and of tensors that are
    // made without any.
    const bool has_dtype = std::ranges::any_of(signature.geometries, [](const Geometry& each) {
        const c10::ScalarType type = each.dtype.toScalarType();
        return c10::isFloatingType(type) || c10::isComplexType(type);
    });
    const std::int64_t then = signature.key[1];
    return signature.facts.is_aten && has_dtype ? with_present_dtype(then) : then;
}

torch::jit::Stack call_again(
    const Signature& signature,
    std::span<at::Tensor> tensors,
    std::span<const c10::IValue> unkeyed_args,
    std::span<const std::unique_ptr<RngCheckpoint>> random,
    bool grad_mode,
    c10::function_ref<void(c10::function_ref<void()>)> calling
) {
    torch::jit::Stack stack;
    signature.arguments(stack, tensors, unkeyed_args);
    if (signature.takes_over) {
        stack.push_back(stack.front());
    }
    // NOLINTNEXTLINE(bugprone-unchecked-optional-access): there if it takes over
    const c10::OperatorHandle& op = signature.takes_over ? *signature.facts.twin : signature.op;
    const bool is_tried = signature.facts.has(Traits::TRIED);
    std::optional<ThreadState> then;
    std::optional<ScopedThreadState> state;
    std::optional<ReplayDispatchGuard> guard;
    if (is_tried) [[unlikely]] {
        then = ThreadState::in(signature.key);
        state.emplace(*then);
    } else {
        guard.emplace(grad_mode);
    }
    calling([&] {
        const ScopedGlobalFlags switched(
            flags_of(signature), signature.key[2], signature.facts.is_aten
        );
        if (is_tried) [[unlikely]] {
            const auto body = [&] { op.redispatchBoxed(then->keys, &stack); };
            random.empty() ? body() : PrivateGenerators(random).call_body(op, stack, body);
        } else if (random.empty()) {
            op.callBoxed(stack);
        } else {
            PrivateGenerators(random).call(op, stack);
        }
    });
    return stack;
}

c10::SmallVector<StoragePtr, 2> run_again(const Recipe& recipe, bool in_place, Calling calling) {
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
