#include "call_again.h"

#include <algorithm>
#include <optional>

#include "../torch/geometry.h"
#include "../torch/global_flags.h"
#include "../torch/private_generators.h"
#include "../torch/replay_dispatch_guard.h"
#include "../torch/thread_state.h"

namespace rekindle {

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

namespace {

// Only so many arguments are compared with each other.
constexpr std::size_t MOST_COMPARED = 16;

bool are_same_view(const c10::TensorImpl& one, const c10::TensorImpl& other) {
    return one.unsafe_storage().unsafeGetStorageImpl() ==
               other.unsafe_storage().unsafeGetStorageImpl() &&
           one.storage_offset() == other.storage_offset() && one.sizes() == other.sizes() &&
           one.strides() == other.strides() && one.dtype() == other.dtype() &&
           one.key_set() == other.key_set();
}

// Pass one tensor object for equal arguments, as programs do. Some kernels compare the objects: if
// query, key and value of an attention are one tensor, it makes one product instead of three, which
// gives other bits.
void share_equal(std::span<at::Tensor> tensors) {
    const std::size_t n = std::min(tensors.size(), MOST_COMPARED);
    for (std::size_t i = 1; i < n; ++i) {
        const auto same = std::ranges::find_if(tensors.first(i), [&](const at::Tensor& before) {
            return has_memory(*before.unsafeGetTensorImpl()) &&
                   has_memory(*tensors[i].unsafeGetTensorImpl()) &&
                   are_same_view(*before.unsafeGetTensorImpl(), *tensors[i].unsafeGetTensorImpl());
        });
        if (same != tensors.first(i).end()) {
            tensors[i] = *same;
        }
    }
}

}  // namespace

torch::jit::Stack call_again(
    const Signature& signature,
    std::span<at::Tensor> tensors,
    std::span<const c10::IValue> unkeyed_args,
    std::span<const std::unique_ptr<RngCheckpoint>> random,
    bool grad_mode,
    c10::function_ref<void(c10::function_ref<void()>)> calling
) {
    share_equal(tensors);
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

}  // namespace rekindle
