#include "private_generators.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <utility>

#include "../base/mutex.h"
#include "arguments.h"
#include "dispatch_key.h"
#include "geometry.h"
#include "random.h"

namespace rekindle {

namespace {

// Return the device of the tensors in `values`; none without a tensor. A tensor on a CPU decides
// only if no other is on another device, because it may be a single number.
std::optional<c10::Device> device_of(std::span<const c10::IValue> values) {
    std::optional<c10::Device> found;
    each_tensor(values, [&](std::uint32_t /*position*/, const at::Tensor& tensor) {
        if (tensor.defined() && (!found || found->is_cpu())) {
            found = tensor.device();
        }
    });
    return found;
}

bool is_for_generator(const c10::Argument& argument) {
    const c10::TypePtr& type = argument.type();
    if (const auto optional = type->cast<c10::OptionalType>()) {
        return optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
    }
    return type->kind() == c10::TypeKind::GeneratorType;
}

// Scope in which the generator `programs` has the state of the generator `own`, and advances it.
// The scope exchanges the generator's state object instead of setting the state: setting it would
// make the next cuDNN RNN with dropout reseed itself from the default generator.
class Exchanged final {
public:
    Exchanged(at::Generator programs, const at::Generator& own)
        : lock_(locked_if_not_mine()),
          programs_(std::move(programs)),
          before_(programs_.graphsafe_get_state()) {
        set(own);
    }

    Exchanged(const Exchanged&) = delete;
    Exchanged& operator=(const Exchanged&) = delete;

    ~Exchanged() { set(before_); }

private:
    void set(const at::Generator& state) {
        const std::scoped_lock guard(programs_.mutex());
        programs_.graphsafe_set_state(state);
    }

    const std::unique_lock<Mutex> lock_;
    at::Generator programs_;
    const at::Generator before_;
};

}  // namespace

// Scope in which the operators that this thread calls pass Rekindle's dispatch key.
class PrivateGenerators::Intercepting final {
public:
    explicit Intercepting(PrivateGenerators& generators)
        : before_(std::exchange(of_this_thread(), &generators)),
          keys_(
              c10::impl::tls_local_dispatch_key_set().included_ | c10::DispatchKeySet(KEY),
              c10::impl::tls_local_dispatch_key_set().excluded_ - c10::DispatchKeySet(KEY)
          ) {
        ++intercepting;
    }

    Intercepting(const Intercepting&) = delete;
    Intercepting& operator=(const Intercepting&) = delete;

    ~Intercepting() {
        --intercepting;
        of_this_thread() = before_;
    }

private:
    PrivateGenerators* const before_;
    const c10::impl::ForceDispatchKeyGuard keys_;
};

PrivateGenerators*& PrivateGenerators::of_this_thread() noexcept {
    thread_local PrivateGenerators* now = nullptr;
    return now;
}

PrivateGenerators::PrivateGenerators(std::span<const std::unique_ptr<RngCheckpoint>> states) {
    for (const std::unique_ptr<RngCheckpoint>& each : states) {
        pairs_.push_back({each->generator(), each->copy()});
    }
}

void PrivateGenerators::call(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
    if (pass_to(op, stack)) {
        op.callBoxed(stack);
    } else if (const Pair* pair = drawn_by_kernel(op, stack)) {
        const Exchanged guard(pair->programs, pair->own);
        op.callBoxed(stack);
    } else {
        const Intercepting guard(*this);
        op.callBoxed(stack);
    }
}

void PrivateGenerators::call_body(
    const c10::OperatorHandle& op, torch::jit::Stack& stack, c10::function_ref<void()> body
) {
    pass_to(op, stack, false);
    const Intercepting guard(*this);
    body();
}

void PrivateGenerators::intercept(
    const c10::OperatorHandle& op, torch::jit::Stack& stack, c10::function_ref<void()> run
) {
    std::optional<Exchanged> guard;
    if (!pass_to(op, stack)) {
        if (const Pair* pair = drawn_by_kernel(op, stack)) {
            guard.emplace(pair->programs, pair->own);
        }
    }
    run();
}

// Return the pair of the default generator of `device`; null if its state was not recorded.
const PrivateGenerators::Pair* PrivateGenerators::default_on(c10::Device device) const {
    const auto is_it = [&](const Pair& pair) {
        return pair.programs.device() == device && pair.programs == default_generator(device);
    };
    const auto* const found = std::ranges::find_if(pairs_, is_it);
    return found == pairs_.end() ? nullptr : found;
}

// Give the operator private generators as arguments. Return false if it has no argument for one, or
// if the device is unknown. for_default: also where the program passed no generator.
bool PrivateGenerators::pass_to(
    const c10::OperatorHandle& op, torch::jit::Stack& stack, bool for_default
) const {
    const std::vector<c10::Argument>& arguments = op.schema().arguments();
    const auto given = std::span(stack).last(arguments.size());
    bool passed = false;
    for (std::size_t i = 0; i < given.size(); ++i) {
        if (!is_for_generator(arguments[i])) {
            continue;
        }
        const Pair* found = nullptr;
        if (given[i].isGenerator()) {
            const at::Generator& programs = given[i].toGenerator();
            const auto is_it = [&](const Pair& pair) { return pair.programs == programs; };
            const auto* const at = std::ranges::find_if(pairs_, is_it);
            found = at == pairs_.end() ? nullptr : at;
        } else if (const auto device = for_default ? device_of(given) : std::nullopt) {
            found = default_on(*device);
        }
        if (found != nullptr) {
            given[i] = found->own;
            passed = true;
        }
    }
    return passed;
}

// Return the pair of the default generator from which the kernel of `op` may draw without calling
// an operator; null if there is none. Only kernels of accelerators do that. Composite kernels call
// other operators.
const PrivateGenerators::Pair* PrivateGenerators::drawn_by_kernel(
    const c10::OperatorHandle& op, const torch::jit::Stack& stack
) const {
    const std::optional<c10::Device> device =
        device_of(last_values(stack, op.schema().arguments().size()));
    const bool draws = op.hasTag(at::Tag::nondeterministic_seeded) &&
                       op.operator_name().name.starts_with("aten::") &&
                       !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
                       !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    return draws && device && !device->is_cpu() ? default_on(*device) : nullptr;
}

}  // namespace rekindle
