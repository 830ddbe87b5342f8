// Parses an operator call of the program. The result is the key of the call's signature, and the
// arguments that the key does not contain.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
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
    ParsedCall(ParsedCall&&) = delete;
    ParsedCall& operator=(ParsedCall&&) = delete;
    ~ParsedCall() = default;

    // Parse the arguments on top of `stack`.
    void take(const torch::jit::Stack& stack);
    // Record that the operator's result will be written over its first argument.
    void take_over();

    const Facts& facts;
    CallKey key;
    // Tensor arguments in order. A tensor without memory of its own, such as a sparse one, is
    // replaced by its components.
    c10::SmallVector<c10::TensorImpl*, 8> tensors;
    std::vector<at::Tensor> parts;  // Keeps these components alive.
    // Arguments that the key does not contain: doubles, generators, wrapped numbers.
    c10::SmallVector<c10::IValue, 2> unkeyed_args;
    // Indices into `tensors` of the tensors that the operator writes.
    c10::SmallVector<std::uint32_t, 2> written;
    bool takes_over = false;  // True if the result is written over the first argument.
    bool opaque = false;      // True if an argument cannot be rebuilt for a recomputation.
    c10::intrusive_ptr<Signature> signature;

private:
    void take_argument(const c10::IValue& value, std::uint32_t position);
    void take_tensor(const at::Tensor& tensor, bool is_written);
    bool take_wrapped(const c10::TensorImpl& tensor);
    void take_list(const c10::IValue& value, std::uint32_t position);
    void take_text(std::string_view text);
    void take_statistics(const torch::jit::Stack& stack);

    bool sees_requires_grad_ = false;
};

}  // namespace rekindle
