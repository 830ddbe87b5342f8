// Parses an operator call of the program. The result is the key of the call's signature, and the
// arguments that the key does not contain.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>
#include <c10/util/OptionalArrayRef.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "call_key.h"
#include "facts.h"
#include "signature.h"

namespace rekindle {

// The parsed arguments of one operator call of the program.
class ParsedCall final {
public:
    explicit ParsedCall(const Facts& what) : facts(what) {}

    ParsedCall(const ParsedCall&) = delete;
    ParsedCall& operator=(const ParsedCall&) = delete;
    ~ParsedCall() = default;

    // Parse the arguments on top of `stack`. `keys`: the dispatch keys of the call.
    void take(const torch::jit::Stack& stack, c10::DispatchKeySet keys);

    // The same for arguments that keep their C++ types: `begin`, then `add` for each argument in
    // order, then `end`. The key is the one that `take` gives.
    void begin();

    template <class T>
    void add(const T& argument) {
        take_argument(argument);
        ++position_;
    }

    void end();

    // Record that the operator's result will be written over its first argument.
    void take_over();
    // Undo that.
    void leave_first();

    const Facts& facts;
    CallKey key;
    // Tensor arguments in order. A tensor without memory of its own, such as a sparse one, is
    // replaced by its components.
    c10::SmallVector<c10::TensorImpl*, 8> tensors;
    std::vector<at::Tensor> parts;  // Keeps these components alive.
    // Arguments that the key does not contain, unless the operator is tried: doubles, generators,
    // wrapped numbers.
    c10::SmallVector<c10::IValue, 2> unkeyed_args;
    // Indices into `tensors` of the tensors that the operator writes.
    c10::SmallVector<std::uint32_t, 2> written;
    bool takes_over = false;  // True if the result is written over the first argument.
    bool opaque = false;      // True if an argument cannot be rebuilt for a recomputation.
    c10::intrusive_ptr<Signature> signature;

private:
    void take_argument(const c10::IValue& value);
    void take_argument(const at::Tensor& tensor);
    void take_argument(const c10::Scalar& number);
    void take_argument(std::int64_t number);
    void take_argument(bool flag);
    void take_argument(c10::ScalarType dtype);
    void take_argument(c10::IntArrayRef numbers);
    void take_argument(std::string_view text);
    void take_nothing();

    template <class T>
    void take_argument(const std::optional<T>& value) {
        value ? take_argument(*value) : take_nothing();
    }

    void take_argument(const at::OptionalIntArrayRef& numbers) {
        numbers ? take_argument(*numbers) : take_nothing();
    }

    void take_tensor(const at::Tensor& tensor, bool is_written);
    bool take_wrapped(const c10::TensorImpl& tensor);
    void take_list(const c10::IValue& value);
    void take_statistics(const torch::jit::Stack& stack);
    void take_state(c10::DispatchKeySet keys);

    std::uint32_t position_ = 0;  // position of the argument that is parsed
    bool sees_requires_grad_ = false;
};

}  // namespace rekindle
