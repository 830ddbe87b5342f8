// One call of an operator by the program, as PyTorch's dispatcher delivers it.
//
// NOTE [Boxed and typed calls]
//
// The dispatcher delivers most operators boxed: their arguments are `IValue`s on a stack. Boxing
// allocates the stack and counts a reference to each tensor. For a small operator this takes about
// a fifth of the time that the core adds. So operators that training steps call very often have
// kernels of their own at the core's dispatch key (dispatch/typed_kernels.cpp), which get the
// arguments as C++ values: a `TypedCall`. Rarely used code reads the arguments from a stack in any
// case. When it asks for the stack of a typed call, the call boxes its arguments, and is a boxed
// call from then on.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "../torch/arguments.h"
#include "../torch/dispatch_key.h"
#include "../torch/geometry.h"
#include "../torch/storage_ptr.h"
#include "facts.h"
#include "parsed_call.h"

namespace rekindle {

// What the core must know of an argument to let the operator's result be written over its first
// argument.
struct Operand final {
    enum class Kind : std::uint8_t { tensor, integer, plain, composite };

    Kind kind = Kind::plain;
    std::int64_t integer = 0;
    const at::Tensor* tensor = nullptr;

    static Operand of(const c10::IValue& value);

    static Operand of(const at::Tensor& value) { return {Kind::tensor, 0, &value}; }

    static Operand of(std::int64_t value) { return {Kind::integer, value, nullptr}; }

    static Operand of(c10::ScalarType value) { return of(static_cast<std::int64_t>(value)); }

    static Operand of(const c10::Scalar& value) { return of(c10::IValue(value)); }

    static Operand of(std::string_view /*value*/) { return {}; }
};

using Operands = c10::SmallVector<Operand, 4>;

// A call whose arguments are on a stack. After `run` its results are there instead.
class OperatorCall {
public:
    OperatorCall(
        const c10::OperatorHandle& called, c10::DispatchKeySet all_keys, torch::jit::Stack* stack
    )
        : op(called), keys(all_keys), stack_(stack), size_(stack->size()) {}

    OperatorCall(const OperatorCall&) = delete;
    OperatorCall& operator=(const OperatorCall&) = delete;

    const c10::OperatorHandle& op;
    const c10::DispatchKeySet keys;

    bool is_boxed() const noexcept { return stack_ != nullptr; }

    // Return the properties of the operator. Requires the session mutex.
    const Facts& facts() {
        if (facts_ == nullptr) {
            return facts_of(op);
        }
        if (*facts_ == nullptr) {
            *facts_ = &facts_of(op);
        }
        return **facts_;
    }

    // Return the stack with the arguments or results on top. A typed call boxes its arguments
    // first; it must not have run yet.
    torch::jit::Stack& stack() {
        if (stack_ == nullptr) {
            stack_ = &box();
            size_ = stack_->size();
        }
        return *stack_;
    }

    // Replace what is left of the arguments on the stack by `arguments`, to run the kernel again.
    void put_back(std::span<const c10::IValue> arguments) {
        stack_->resize(size_ - arguments.size());
        stack_->insert(stack_->end(), arguments.begin(), arguments.end());
    }

    // Return what the `n` arguments are, in order.
    virtual Operands operands(std::size_t n);
    // Parse the arguments into `parsed`.
    virtual void parse(ParsedCall& parsed);
    // Return true if an argument is a FakeTensor in C++.
    virtual bool has_fakes() const;
    // Call the next kernel in the dispatcher.
    virtual void run();
    // Call `twin`, the operator's overload that writes the result into a given tensor, and let it
    // write over the first of the `n` arguments. The result is a tensor with that argument's memory
    // and the geometry `geometry`.
    virtual void run_over_first(
        std::size_t n, const c10::OperatorHandle& twin, const Geometry& geometry
    );
    // Return the `n` results. A typed call that wrote its argument in place returns none.
    virtual std::span<const c10::IValue> results(std::size_t n) const;

protected:
    // A call whose arguments are not on a stack. facts: the operator's properties, null until they
    // are known. They stay there: the operator must never be removed from the dispatcher.
    OperatorCall(
        const c10::OperatorHandle& called, c10::DispatchKeySet all_keys, const Facts*& facts
    )
        : op(called), keys(all_keys), facts_(&facts) {}

    ~OperatorCall() = default;

private:
    // Put the arguments of a typed call on a stack.
    virtual torch::jit::Stack& box() { return *stack_; }

    const Facts** const facts_ = nullptr;
    torch::jit::Stack* stack_ = nullptr;  // null while the arguments are C++ values
    std::size_t size_ = 0;                // size of the stack with the arguments
};

// A call whose arguments are on a stack for good.
class BoxedCall final : public OperatorCall {
public:
    using OperatorCall::OperatorCall;
};

// A call whose arguments are C++ values of the types `Arguments`.
template <class Result, class... Arguments>
class TypedCall final : public OperatorCall {
    static constexpr bool IN_PLACE = std::is_same_v<Result, at::Tensor&>;
    static_assert(IN_PLACE || std::is_same_v<Result, at::Tensor>);

public:
    using Redispatch = Result (*)(c10::DispatchKeySet, Arguments...);
    using RedispatchTwin = at::Tensor& (*)(c10::DispatchKeySet, Arguments..., at::Tensor&);

    // redispatch: calls the next kernel. twin: calls the next kernel of the overload that writes
    // the result into a given tensor; null if there is none.
    TypedCall(
        const c10::OperatorHandle& called,
        c10::DispatchKeySet all_keys,
        const Facts*& facts,
        Redispatch redispatch,
        RedispatchTwin twin,
        std::remove_reference_t<Arguments>&... arguments
    )
        : OperatorCall(called, all_keys, facts),
          redispatch_(redispatch),
          twin_(twin),
          arguments_(arguments...) {}

    Operands operands(std::size_t n) override {
        if (is_boxed()) [[unlikely]] {
            return OperatorCall::operands(n);
        }
        return each_argument([](auto&... each) { return Operands{Operand::of(each)...}; });
    }

    void parse(ParsedCall& parsed) override {
        if (is_boxed()) [[unlikely]] {
            OperatorCall::parse(parsed);
            return;
        }
        parsed.begin();
        each_argument([&](auto&... each) { (parsed.add(each), ...); });
        parsed.end();
    }

    bool has_fakes() const override {
        return std::apply(
            [](const auto&... each) { return (is_fake_argument(each) || ...); }, arguments_
        );
    }

    void run() override {
        if (is_boxed()) [[unlikely]] {
            OperatorCall::run();
            return;
        }
        const auto call = [&](auto&... each) -> Result {
            return redispatch_(keys & BELOW_KEY, std::forward<Arguments>(each)...);
        };
        if constexpr (IN_PLACE) {
            result_ = &each_argument(call);
        } else {
            result_ = c10::IValue(each_argument(call));
        }
    }

    void run_over_first(
        std::size_t n, const c10::OperatorHandle& twin, const Geometry& geometry
    ) override {
        if (is_boxed() || twin_ == nullptr) [[unlikely]] {
            stack();
            OperatorCall::run_over_first(n, twin, geometry);
            return;
        }
        if constexpr (!IN_PLACE) {
            at::Tensor over = std::get<0>(arguments_);
            each_argument([&](auto&... each) {
                twin_(keys & BELOW_KEY, std::forward<Arguments>(each)..., over);
            });
            result_ = geometry.in(storage_of(*over.unsafeGetTensorImpl()));
        }
    }

    std::span<const c10::IValue> results(std::size_t n) const override {
        if (is_boxed()) [[unlikely]] {
            return OperatorCall::results(n);
        }
        if constexpr (IN_PLACE) {
            return {};
        } else {
            return {&result_, 1};
        }
    }

    // Return the result of the call, which has run.
    Result take_result() {
        if constexpr (IN_PLACE) {
            return is_boxed() ? std::get<0>(arguments_) : *result_;
        } else {
            return std::move(is_boxed() ? stack().back() : result_).toTensor();
        }
    }

private:
    template <class T>
    static bool is_fake_argument(const T& value) {
        if constexpr (std::is_same_v<T, at::Tensor>) {
            return is_fake(value);
        } else {
            return false;
        }
    }

    template <class F>
    decltype(auto) each_argument(F&& visit) {
        return std::apply(std::forward<F>(visit), arguments_);
    }

    torch::jit::Stack& box() override {
        torch::jit::Stack& stack = boxed_.emplace();
        each_argument([&](auto&... each) { torch::jit::push(stack, each...); });
        return stack;
    }

    const Redispatch redispatch_;
    const RedispatchTwin twin_;
    const std::tuple<std::remove_reference_t<Arguments>&...> arguments_;
    std::conditional_t<IN_PLACE, at::Tensor*, c10::IValue> result_{};
    std::optional<torch::jit::Stack> boxed_;
};

}  // namespace rekindle
