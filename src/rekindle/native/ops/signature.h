// Signatures of operator calls. Calls that differ only in the contents of their tensors share a
// signature.
//
// A signature holds the arguments of an operator call, with the geometry (shape, strides, offset,
// dtype, device) in place of each tensor. With a signature the runtime predicts the sizes of
// results and estimates the cost. With a signature and tensors it recomputes a call. Arguments that
// change from call to call (doubles, generators) are stored with each call as `unkeyed_args`.
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
#include "slicing.h"

namespace rekindle {

// Predicted bytes of an operator's results: exact if `known`, otherwise an upper bound or a guess.
struct Need final {
    Bytes nbytes;
    bool known;
};

class OperatorCall;
class ParsedCall;

// A signature, with measurements of its operator calls. All recipes with this signature share the
// object.
class Signature final : public c10::intrusive_ptr_target {
public:
    Signature(c10::OperatorHandle called, ParsedCall& parsed, const torch::jit::Stack& stack);
    Signature(const Signature&) = delete;
    Signature& operator=(const Signature&) = delete;
    ~Signature() override = default;

    const Facts& facts;
    const c10::OperatorHandle op;
    const std::vector<std::int64_t> key;
    const bool takes_over;             // True if the result is written over the first argument.
    std::vector<Geometry> geometries;  // Geometries of the tensor arguments, in order.
    // Bytes of all new storages that a call makes, or an upper bound; negative while unknown.
    Bytes needed = -1;
    bool bound = false;  // True if `needed` is an upper bound.
    // Bytes of each new storage that a call makes; none until a call has run.
    std::optional<std::vector<Bytes>> pieces;
    // Positions of the results that have new storages; none until a call has run.
    std::optional<std::vector<std::uint32_t>> fresh;
    // True if the results are strided tensors of known sizes, and the operator can be recomputed
    // and updates no running statistics.
    bool ordinary = false;
    bool priced = false;
    Nanoseconds cost = 0;
    // Largest measured workspace of a call: bytes in use in addition to its results.
    Bytes workspace = 0;
    int watched = 0;  // Number of calls whose workspace was measured.
    Probation probation;
    std::optional<Slicing> slicing;  // result of `find_slicing`; none until somebody asked
    std::size_t latest = 0;  // Number of the latest call with this signature (`CallHistory`).

    // Predict the bytes of the results by the operator's meta kernel, which computes only shapes.
    // Without a meta kernel, or if sizes depend on contents of tensors, return a bound. This may
    // run Python code, so the caller must not hold the session mutex.
    Need predict(
        std::span<const c10::IValue> given,
        std::span<const c10::IValue> unkeyed_args,
        const Device& device
    ) const;
    // Return how calls with this signature run in slices. This may run Python code, so the caller
    // must not hold the session mutex.
    Slicing find_slicing(std::span<const c10::IValue> unkeyed_args) const;
    // Record which of a call's results have new storages (`positions`), and their total bytes.
    void learn(std::span<const std::uint32_t> positions, Bytes nbytes, bool non_strided_result);
    // Record that one run of the operator took `elapsed`. The cost is the shortest measured time.
    void sample(Nanoseconds elapsed) noexcept;
    // Record that one run of the operator used a workspace of `inside` bytes. The second
    // measurement replaces the first, because a first run may use more (cuDNN tries several
    // kernels).
    void took(Bytes inside) noexcept;
    // Return a number that identifies this signature in all processes.
    std::int64_t number();
    // Rebuild the arguments of one operator call from this signature, and push them on `stack`. An
    // undefined tensor becomes None.
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
        std::vector<Kind> items;  // Kinds of the elements, if the argument is a list.
        c10::IValue constant;
    };

    Part part_of(const c10::IValue& value) const;
    torch::jit::Stack run_on_meta(
        std::span<at::Tensor> metas, std::span<const c10::IValue> unkeyed_args
    ) const;
    Bytes bytes_on_meta(std::span<const c10::IValue> unkeyed_args, const Device& device) const;

    std::vector<Part> parts_;
    // True if every argument can be rebuilt from `parts_`, tensors, and the `unkeyed_args` of a
    // call.
    bool rebuildable_;
    int samples_ = 0;
    std::int64_t number_ = -1;
};

// Return the key that the next operator call has if the program repeats its calls; empty if no key
// is expected. Valid until `signature_of` is called.
std::span<const std::int64_t> expected_key() noexcept;
// Return the signature of an operator call. Calls with equal keys share one signature, until the
// cache of signatures is full and is cleared.
c10::intrusive_ptr<Signature> signature_of(OperatorCall& call, ParsedCall& parsed);
std::size_t signatures_known() noexcept;
// Let operators be tried again that are kept, because the program has declared some of them.
void retry_kept_signatures();
std::vector<const Signature*> all_signatures();

// For tests: give every signature this cost. A negative value restores measured costs.
void fix_costs(Nanoseconds cost) noexcept;

}  // namespace rekindle
