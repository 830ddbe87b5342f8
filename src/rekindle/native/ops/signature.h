// Calls that differ only in the content of their tensors share a signature.
//
// A signature holds the arguments with a geometry in the place of each tensor: enough to know the
// sizes of the results before the operator runs, to price it, and, with tensors put back, to run it
// again. Numbers that change from call to call (a double, a generator) stay out of it, as extras.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "../base/types.h"
#include "../torch/device.h"
#include "../torch/geometry.h"
#include "facts.h"

namespace rekindle {

// What the results of a call take. `known`: just that; else it is a bound or a guess.
struct Need final {
    Bytes nbytes;
    bool known;
};

class Invocation;

class Signature final : public c10::intrusive_ptr_target {
public:
    Signature(
        c10::OperatorHandle called, const Invocation& invocation, const torch::jit::Stack& stack
    );
    Signature(const Signature&) = delete;
    Signature& operator=(const Signature&) = delete;
    Signature(Signature&&) = delete;
    Signature& operator=(Signature&&) = delete;
    ~Signature() override = default;

    const Facts& facts;
    const c10::OperatorHandle op;
    const std::vector<std::int64_t> key;
    std::vector<Geometry> geometries;  // of the tensor arguments, in order
    Bytes needed = -1;   // of the storages that a call makes, or an upper bound; negative: unknown
    bool bound = false;  // it is an upper bound
    std::optional<std::vector<Bytes>> pieces;         // of each of those storages, once it is known
    std::optional<std::vector<std::uint32_t>> fresh;  // which results have storages of their own
    bool ordinary = false;  // its bytes are known beforehand, and nothing else to look out for
    bool priced = false;
    Nanoseconds cost = 0;
    // The most that a call had in use beside what it made, at any time while it ran.
    Bytes workspace = 0;
    int watched = 0;  // calls of which that is known

    // Bytes of what a call will make, from the operator's meta kernel: nothing is computed. Where
    // there is none, or sizes depend on values: a bound. May run Python: without the core's lock.
    Need predict(
        std::span<const c10::IValue> given,
        std::span<const c10::IValue> extras,
        const Device& device
    ) const;
    // Which of the tensors that a call returned are new, and their bytes.
    void learn(std::span<const std::uint32_t> positions, Bytes nbytes, bool exotic);
    // Takes one execution into the price: the least of the first three.
    void sample(Nanoseconds elapsed) noexcept;
    // Takes one execution, which had `inside` bytes in use beside what it made. The first may have
    // been special, as where cuDNN tries what is fastest: the second one counts anew.
    void took(Bytes inside) noexcept;
    // By which it is known in every process.
    std::int64_t number();
    // The arguments of one call again; a tensor that is not defined is left out as None.
    void arguments(
        torch::jit::Stack& stack, std::span<at::Tensor> tensors, std::span<const c10::IValue> extras
    ) const;

private:
    enum class Kind : std::uint8_t {
        constant,
        tensor,
        undefined,
        extra,
        wrapped,
        list,
        optionals,
        numbers
    };

    struct Part final {
        Kind kind;
        std::vector<Kind> items;  // of a list
        c10::IValue constant;
    };

    Part part_of(const c10::IValue& value) const;
    Bytes bytes_on_meta(std::span<const c10::IValue> extras, const Device& device) const;
    std::int64_t elements() const;

    std::vector<Part> parts_;
    bool rebuildable_;  // all arguments are in the parts, or in extras
    int samples_ = 0;
    std::int64_t number_ = -1;
};

// The signature of a call, for as long as nobody asks for too many others.
c10::intrusive_ptr<Signature> signature_of(
    const c10::OperatorHandle& op, const Invocation& invocation, const torch::jit::Stack& stack
);
std::size_t signatures_known() noexcept;
std::vector<const Signature*> all_signatures();

// Tests give every signature the same price; negative: prices are measured.
void fix_costs(Nanoseconds cost) noexcept;

}  // namespace rekindle
