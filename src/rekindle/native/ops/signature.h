// Calls that differ only in the contents of their tensors share a signature.
//
// A signature holds the arguments, with a geometry in place of each tensor. That is enough to
// predict the sizes of the results, to estimate the cost, and, given tensors, to run the call
// again. Arguments that change from call to call (doubles, generators) are stored per call as
// extras.
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
#include "probation.h"

namespace rekindle {

// Bytes that the results of a call take: exact if `known`, otherwise a bound or a guess.
struct Need final {
    Bytes nbytes;
    bool known;
};

class ParsedCall;

// A signature and the measurements of its calls. Shared by all recipes with it.
class Signature final : public c10::intrusive_ptr_target {
public:
    Signature(c10::OperatorHandle called, const ParsedCall& parsed, const torch::jit::Stack& stack);
    Signature(const Signature&) = delete;
    Signature& operator=(const Signature&) = delete;
    Signature(Signature&&) = delete;
    Signature& operator=(Signature&&) = delete;
    ~Signature() override = default;

    const Facts& facts;
    const c10::OperatorHandle op;
    const std::vector<std::int64_t> key;
    const bool takes_over;             // The result is written over the first argument.
    std::vector<Geometry> geometries;  // Tensor arguments, in order.
    // Bytes of the storages that a call makes, or an upper bound; negative if unknown.
    Bytes needed = -1;
    bool bound = false;                        // `needed` is an upper bound.
    std::optional<std::vector<Bytes>> pieces;  // Bytes of each of those storages, once known.
    // Results that have storages of their own, once known.
    std::optional<std::vector<std::uint32_t>> fresh;
    // The size is known beforehand, and the call needs no special treatment.
    bool ordinary = false;
    bool priced = false;
    Nanoseconds cost = 0;
    // Largest number of bytes that a call had in use in addition to its outputs.
    Bytes workspace = 0;
    int watched = 0;  // Number of calls whose workspace was measured.
    Probation probation;

    // Predict the bytes of the results with the operator's meta kernel, which computes nothing.
    // Returns a bound if there is no meta kernel or sizes depend on values. May run Python, so the
    // caller must not hold the session mutex.
    Need predict(
        std::span<const c10::IValue> given,
        std::span<const c10::IValue> unkeyed_args,
        const Device& device
    ) const;
    // Record which of the tensors that a call returned have new storages, and their bytes.
    void learn(std::span<const std::uint32_t> positions, Bytes nbytes, bool non_strided_result);
    // Record the time of one execution. The cost is the least of the first three.
    void sample(Nanoseconds elapsed) noexcept;
    // Record that one execution had `inside` bytes of workspace. The second measurement replaces
    // the first, which may be special (cuDNN tries several kernels).
    void took(Bytes inside) noexcept;
    // Return a number that identifies the signature in every process.
    std::int64_t number();
    // Rebuild the arguments of one call. An undefined tensor becomes None.
    void arguments(
        torch::jit::Stack& stack,
        std::span<at::Tensor> tensors,
        std::span<const c10::IValue> unkeyed_args
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
        std::vector<Kind> items;  // Elements of a list.
        c10::IValue constant;
    };

    Part part_of(const c10::IValue& value) const;
    Bytes bytes_on_meta(std::span<const c10::IValue> unkeyed_args, const Device& device) const;
    std::int64_t elements() const;

    std::vector<Part> parts_;
    bool rebuildable_;  // All arguments are in `parts_` or in extras.
    int samples_ = 0;
    std::int64_t number_ = -1;
};

// Return the signature of a call. It is cached until there are too many.
c10::intrusive_ptr<Signature> signature_of(
    const c10::OperatorHandle& op, const ParsedCall& parsed, const torch::jit::Stack& stack
);
std::size_t signatures_known() noexcept;
std::vector<const Signature*> all_signatures();

// For tests: give each signature the same cost; if negative, measure costs.
void fix_costs(Nanoseconds cost) noexcept;

}  // namespace rekindle
