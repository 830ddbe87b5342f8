#include "gradients_in_turn.h"

#include <array>
#include <utility>

#include "../torch/arguments.h"

namespace rekindle {

namespace {

// A share of the budget. The kernels copy what they read, and something else is in memory as well.
constexpr Bytes LARGE_GRADIENTS_SHARE = 4;

Bytes bytes_of_tensor(const c10::IValue& value) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.numel() * static_cast<Bytes>(tensor.element_size());
}

}  // namespace

bool run_gradients_in_turn(
    Session& session,
    const Facts& facts,
    OperatorCall& call,
    Locked& lock,
    c10::function_ref<void(OperatorCall&)> run
) {
    if (!session.may_slice() || session.engine.budget == UNLIMITED) {
        return false;
    }
    torch::jit::Stack& stack = call.stack();
    const std::span<const c10::IValue> given = last_values(stack, facts.arguments);
    const c10::List<bool> mask = given.back().toBoolList();
    const Bytes total = bytes_of_tensor(given[0]) + 2 * bytes_of_tensor(given[1]) + 2 * bytes_of_tensor(given[2]);
    if (!mask[0] || !(mask[1] || mask[2]) || total <= session.engine.budget / LARGE_GRADIENTS_SHARE) {
        return false;
    }
    lock.unlock();
    std::array<c10::IValue, 3> results{at::Tensor(), at::Tensor(), at::Tensor()};
    for (const auto& wanted : {c10::List<bool>{false, mask[1], mask[2]}, {true, false, false}}) {
        torch::jit::Stack part(given.begin(), given.end());
        part.back() = wanted;
        BoxedCall called(call.op, call.keys, &part);
        run(called);
        for (std::size_t i = 0; i < results.size(); ++i) {
            results[i] = wanted[i] ? std::move(part[i]) : std::move(results[i]);
        }
    }
    torch::jit::drop(stack, facts.arguments);
    for (c10::IValue& each : results) {
        stack.push_back(std::move(each));
    }
    return true;
}

}  // namespace rekindle
