#include "operator_call.h"

namespace rekindle {

Operand Operand::of(const c10::IValue& value) {
    if (value.isTensor()) {
        return of(value.toTensor());
    }
    if (value.isInt()) {
        return of(value.toInt());
    }
    return {value.isComplexDouble() || value.isList() ? Kind::composite : Kind::plain, 0, nullptr};
}

Operands OperatorCall::operands(std::size_t n) {
    Operands found;
    for (const c10::IValue& value : last_values(*stack_, n)) {
        found.push_back(Operand::of(value));
    }
    return found;
}

void OperatorCall::parse(ParsedCall& parsed) {
    parsed.take(*stack_, keys);
}

bool OperatorCall::has_fakes() const {
    bool found = false;
    for (const c10::IValue& value : last_values(*stack_, op.schema().arguments().size())) {
        value.visit([&](const c10::IValue& each) {
            found = found || (each.isTensor() && is_fake(each.toTensor()));
            return found;
        });
    }
    return found;
}

void OperatorCall::run() {
    op.redispatchBoxed(keys & BELOW_KEY, stack_);
}

void OperatorCall::run_over_first(
    std::size_t n, const c10::OperatorHandle& twin, const Geometry& geometry
) {
    const at::Tensor over = last_values(*stack_, n)[0].toTensor();
    stack_->emplace_back(over);
    twin.redispatchBoxed(keys & BELOW_KEY, stack_);
    stack_->back() = geometry.in(storage_of(*over.unsafeGetTensorImpl()));
}

std::span<const c10::IValue> OperatorCall::results(std::size_t n) const {
    return last_values(*stack_, n);
}

}  // namespace rekindle
