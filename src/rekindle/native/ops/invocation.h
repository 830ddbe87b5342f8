// A call of an operator taken apart: the key of its signature, and what is not in there.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "facts.h"
#include "signature.h"

namespace rekindle {

// One call of an operator by the program: its arguments, taken apart, and what is known.
class Invocation final {
public:
    explicit Invocation(const Facts& what) : facts(what) {}

    Invocation(const Invocation&) = delete;
    Invocation& operator=(const Invocation&) = delete;
    Invocation(Invocation&&) = delete;
    Invocation& operator=(Invocation&&) = delete;
    ~Invocation() = default;

    void take(const torch::jit::Stack& stack);

    const Facts& facts;
    c10::SmallVector<std::int64_t, 64> key;
    c10::SmallVector<c10::TensorImpl*, 8> tensors;  // in order, or what they are made of
    std::vector<at::Tensor> parts;                  // keeps those
    c10::SmallVector<c10::IValue, 2> extras;        // what is not in the key
    c10::SmallVector<std::uint32_t, 2> written;     // which tensors are written
    bool opaque = false;  // something that cannot be rebuilt is among the arguments
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
