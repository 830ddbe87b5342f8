#include "signature.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ScalarOps.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "../base/address_map.h"
#include "../base/slab.h"
#include "../torch/arguments.h"
#include "../torch/device.h"
#include "../torch/global_flags.h"
#include "../torch/parts.h"
#include "../torch/raised.h"
#include "../torch/replay_dispatch_guard.h"
#include "../torch/versions.h"
#include "meta_kernels.h"
#include "operator_call.h"
#include "parsed_call.h"
#include "sizes.h"

namespace rekindle {

namespace {

constexpr std::size_t MOST_KEPT = 20'000;
constexpr std::uint64_t NO_WORDS = 0x243F6A8885A308D3ULL;
Nanoseconds fixed_cost = -1;

std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) noexcept {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15ULL;
    return hash ^ hash >> 29;
}

// Return a hash of `words`. The multiplications do not depend on each other, so the processor
// overlaps them.
std::uint64_t hash_of(std::span<const std::int64_t> words) noexcept {
    std::uint64_t multiplier = 0x9E3779B97F4A7C15ULL;
    std::uint64_t sum = NO_WORDS;
    for (const std::int64_t word : words) {
        sum += static_cast<std::uint64_t>(word) * multiplier;
        multiplier = std::rotl(multiplier, 5);
    }
    return mixed(sum, sum >> 32);
}

}  // namespace

Signature::Signature(c10::OperatorHandle called, ParsedCall& parsed, const torch::jit::Stack& stack)
    : facts(parsed.facts),
      op(std::move(called)),
      key(parsed.key.words().begin(), parsed.key.words().end()),
      takes_over(parsed.takes_over),
      rebuildable_(!parsed.opaque) {
    const bool asks = facts.has(Traits::SEES_REQUIRES_GRAD) && c10::GradMode::is_enabled();
    for (const c10::TensorImpl* tensor : parsed.tensors) {
        geometries.push_back(Geometry::of(*tensor));
        geometries.back().requires_grad = asks && tensor->requires_grad();
    }
    for (const c10::IValue& value : last_values(stack, facts.arguments)) {
        parts_.push_back(part_of(value));
    }
}

// NOLINTNEXTLINE(misc-no-recursion): no list has lists in it
Signature::Part Signature::part_of(const c10::IValue& value) const {
    if (value.isTensor()) {
        const at::Tensor& tensor = value.toTensor();
        if (!tensor.defined()) {
            return {Kind::undefined, {}, {}};
        }
        const bool wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number();
        return {wrapped ? Kind::wrapped : Kind::tensor, {}, {}};
    }
    if (value.isDouble() || value.isGenerator() || value.isComplexDouble()) {
        return {Kind::extra, {}, {}};
    }
    // Store only plain values, because the signature would keep any other value (a storage, for
    // example) alive.
    if (!value.isList()) {
        const bool keeps = value.isNone() || value.isInt() || value.isBool() || value.isString() ||
                           value.isDevice();
        return {keeps ? Kind::constant : Kind::undefined, {}, keeps ? value : c10::IValue()};
    }
    if (value.isDoubleList()) {
        return {Kind::constant, {}, value};
    }
    const auto items = value.toListRef();
    const auto varies = [](const c10::IValue& item) {
        return item.isTensor() || item.isDouble() || item.isComplexDouble();
    };
    if (std::ranges::none_of(items, varies)) {
        return {Kind::constant, {}, value};
    }
    const auto is_tensor = [](const c10::IValue& item) { return item.isTensor(); };
    const bool of_tensors = std::ranges::any_of(items, is_tensor);
    Part made{of_tensors ? Kind::list : Kind::numbers, {}, {}};
    for (const c10::IValue& item : items) {
        made.items.push_back(part_of(item).kind);
    }
    if (!of_tensors) {
        // The signature keeps the elements of the list that are the same in all of its calls.
        made.constant = value;
    } else if (value.isOptionalTensorList() || !std::ranges::all_of(items, is_tensor)) {
        made.kind = Kind::optionals;
    }
    return made;
}

void Signature::arguments(
    torch::jit::Stack& stack,
    std::span<at::Tensor> tensors,
    std::span<const c10::IValue> unkeyed_args
) const {
    auto tensor = tensors.begin();
    auto extra = unkeyed_args.begin();
    const auto item = [&](Kind kind) -> c10::IValue {
        switch (kind) {
            case Kind::tensor:
                return std::move(*tensor++);
            case Kind::extra:
                return *extra++;
            case Kind::wrapped: {
                at::Tensor made = c10::scalar_to_tensor((extra++)->toScalar());
                made.unsafeGetTensorImpl()->set_wrapped_number(true);
                return made;
            }
            case Kind::undefined:
                return at::Tensor();
            default:
                return {};
        }
    };
    for (const Part& part : parts_) {
        if (part.kind == Kind::constant) {
            stack.push_back(part.constant);
        } else if (part.kind == Kind::list) {
            c10::List<at::Tensor> made;
            for (const Kind kind : part.items) {
                made.push_back(item(kind).toTensor());
            }
            stack.emplace_back(std::move(made));
        } else if (part.kind == Kind::optionals) {
            c10::List<std::optional<at::Tensor>> made;
            for (const Kind kind : part.items) {
                made.push_back(item(kind).toOptional<at::Tensor>());
            }
            stack.emplace_back(std::move(made));
        } else if (part.kind == Kind::numbers) {
            c10::List<c10::Scalar> made;
            for (std::size_t i = 0; i < part.items.size(); ++i) {
                const bool fixed = part.items[i] == Kind::constant;
                made.push_back(
                    (fixed ? part.constant.toListRef()[i] : item(part.items[i])).toScalar()
                );
            }
            stack.emplace_back(c10::impl::toList(std::move(made)));
        } else {
            stack.push_back(item(part.kind));
        }
    }
}

namespace {

// Return a meta tensor with this geometry. It has no memory.
at::Tensor meta_of(const Geometry& geometry) {
    const auto itemsize = static_cast<Bytes>(geometry.dtype.itemsize());
    const std::int64_t length = geometry.reach() / std::max<Bytes>(1, itemsize);
    at::Tensor made(
        at::detail::empty_meta({length}, c10::typeMetaToScalarType(geometry.dtype), std::nullopt)
    );
    c10::TensorImpl& impl = *made.unsafeGetTensorImpl();
    impl.set_sizes_and_strides(geometry.sizes, geometry.strides, geometry.offset);
    impl._set_conj(geometry.conjugate);
    impl._set_neg(geometry.negative);
    return made;
}

// Change the arguments on `stack` so that the operator runs on the meta device.
void on_meta(const Facts& facts, const c10::OperatorHandle& op, torch::jit::Stack& stack) {
    for (std::uint32_t i = 0; i < facts.arguments; ++i) {
        const bool where = op.schema().arguments()[i].name() == "device";
        if (where && (!stack[i].isNone() || facts.arguments == 0 || !stack[0].isTensor())) {
            stack[i] = c10::Device(c10::DeviceType::Meta);
        } else if (stack[i].isGenerator()) {
            stack[i] = c10::IValue();
        }
    }
}

}  // namespace

Need Signature::predict(
    std::span<const c10::IValue> given,
    std::span<const c10::IValue> unkeyed_args,
    const Device& device
) const {
    if (takes_over || !facts.returns_tensors ||
        (facts.writes && facts.returns_written && !facts.resizes)) {
        return {0, true};
    }
    if (!rebuildable_) {  // The meta kernel cannot be called, so guess the largest argument's size.
        Bytes most = 0;
        for (const Geometry& geometry : geometries) {
            most = std::max(most, geometry.nbytes());
        }
        const Bytes padded = largest_padded(given);
        // If a pointwise operator reads a nested tensor, its result has the size of that tensor.
        if (padded != 0 && op.hasTag(at::Tag::pointwise)) {
            return {most, true};
        }
        return {std::max(most, padded), facts.name == "aten::to_padded_tensor"};
    }
    try {
        return {bytes_on_meta(unkeyed_args, device), true};
    } catch (const std::exception& error) {
        // a meta kernel written in Python may raise KeyboardInterrupt, for example
        if (ends_the_program(error)) {
            throw;
        }
        // Ignore the error, because the operator itself reports invalid arguments. Return an upper
        // bound for `nonzero` instead: 8-byte coordinates of all elements of the largest argument.
        std::int64_t most = 0;
        for (const Geometry& geometry : geometries) {
            const auto dimensions = static_cast<std::int64_t>(geometry.sizes.size());
            most = std::max(most, geometry.numel() * std::max<std::int64_t>(1, dimensions));
        }
        return {8 * most * facts.returns, false};
    }
}

// Call the operator's meta kernel on `metas`, which may be moved from. Return its results.
torch::jit::Stack Signature::run_on_meta(
    std::span<at::Tensor> metas, std::span<const c10::IValue> unkeyed_args
) const {
    const auto is_lazy = [](const at::Tensor& each) { return each.is_conj() || each.is_neg(); };
    const bool lazy = std::ranges::any_of(metas, is_lazy);
    torch::jit::Stack stack;
    arguments(stack, metas, unkeyed_args);
    on_meta(facts, op, stack);
    // Hide the call of the meta kernel from the program's profiler.
    const at::DisableRecordFunctionGuard unseen;
    // The dispatcher copies conjugated and negated arguments, so only it may call their kernels.
    if (const c10::KernelFunction* kernel = lazy ? nullptr : meta_kernel_of(op)) {
        kernel->callBoxed(op, c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    } else {
        op.callBoxed(stack);
    }
    return stack;
}

Slicing Signature::find_slicing(std::span<const c10::IValue> unkeyed_args) const {
    Slicing found;
    std::vector<at::Tensor> metas;
    metas.reserve(geometries.size());
    for (const Geometry& geometry : geometries) {
        metas.push_back(meta_of(geometry));
    }
    try {
        const ReplayDispatchGuard guard(false);
        std::vector<at::Tensor> kept = metas;
        each_tensor(run_on_meta(metas, unkeyed_args), [&](std::uint32_t, const at::Tensor& tensor) {
            found.results.push_back(
                tensor.defined() ? Geometry::of(*tensor.unsafeGetTensorImpl()) : Geometry()
            );
            found.results.back().device = geometries[0].device;
        });
        torch::jit::Stack given;
        arguments(given, kept, unkeyed_args);
        found.blockwise = is_blockwise(facts, op, given);
        found.threads = threads_in(key[1]);
        if (found.results.empty()) {
            return found;
        }
        found.joining = joining_of(facts, geometries, given, found.results[0]);
        found.upsampling = upsampling_of(facts, geometries[0], given, found.results[0]);
        for (std::size_t i = 0; i < found.results[0].sizes.size(); ++i) {
            found.axes.push_back(
                axes_of_arguments(facts, op, geometries, given, found, static_cast<int>(i))
            );
        }
    } catch (const std::exception& error) {
        if (ends_the_program(error)) {
            throw;
        }
        found = {};  // the operator itself reports invalid arguments
    }
    return found;
}

Bytes Signature::bytes_on_meta(
    std::span<const c10::IValue> unkeyed_args, const Device& device
) const {
    const ReplayDispatchGuard guard(false);
    std::vector<at::Tensor> metas;
    AddressMap<Bytes> known;
    for (const Geometry& geometry : geometries) {
        metas.push_back(meta_of(geometry));
        const c10::StorageImpl* storage_impl = metas.back().storage().unsafeGetStorageImpl();
        known.put(storage_impl, device.rounded(static_cast<Bytes>(storage_impl->nbytes())));
    }
    const std::vector<at::Tensor> kept = metas;
    const torch::jit::Stack stack = run_on_meta(metas, unkeyed_args);
    Bytes total = 0;
    Bytes element = 0;  // Bytes per element of the results.
    each_tensor(stack, [&](std::uint32_t /*position*/, const at::Tensor& tensor) {
        if (!tensor.defined() || tensor.layout() != c10::kStrided || !tensor.has_storage()) {
            return;
        }
        const c10::StorageImpl* storage_impl = tensor.storage().unsafeGetStorageImpl();
        const Bytes* before = known.find(storage_impl);
        const Bytes nbytes = device.rounded(static_cast<Bytes>(storage_impl->nbytes()));
        total += std::max<Bytes>(0, nbytes - (before == nullptr ? 0 : *before));
        element = static_cast<Bytes>(tensor.element_size());
        known.put(storage_impl, nbytes);
    });
    if (facts.has(Traits::REDUCED_IN_PLACE)) {
        return std::max(total, device.rounded(element * broadcast_elements(geometries)));
    }
    return total;
}

// Return the number of elements that the arguments have when they are broadcast together.
void Signature::learn(
    std::span<const std::uint32_t> positions, Bytes nbytes, bool non_strided_result
) {
    fresh.emplace(positions.begin(), positions.end());
    if (!facts.dynamic && !facts.resizes) {
        needed = nbytes;
        ordinary = !non_strided_result && !facts.opaque && !facts.has(Traits::STATISTICS);
    }
}

void Signature::took(Bytes inside) noexcept {
    workspace = watched > 1 ? std::max(workspace, inside) : inside;
    ++watched;
}

void Signature::sample(Nanoseconds elapsed) noexcept {
    elapsed = fixed_cost >= 0 ? fixed_cost : elapsed;
    cost = samples_ != 0 ? std::min(cost, elapsed) : elapsed;
    ++samples_;
    priced = samples_ >= 3;
}

std::int64_t Signature::number() {
    if (number_ < 0) {
        std::uint64_t hash = NO_WORDS;
        const c10::OperatorName& name = op.operator_name();
        for (const std::string* part : {&name.name, &name.overload_name}) {
            for (const char letter : *part) {
                hash = mixed(hash, static_cast<unsigned char>(letter));
            }
            hash = mixed(hash, part->size());
        }
        // Skip the first word: the operator's address, which differs between processes.
        for (std::size_t i = 1; i < key.size(); ++i) {
            hash = mixed(hash, static_cast<std::uint64_t>(key[i]));
        }
        number_ = static_cast<std::int64_t>(hash >> 4);
    }
    return number_;
}

// -- all signatures -------------------------------------------------------------------------------

namespace {

// The signatures of the latest calls. It expects that the program goes on as it did after an
// earlier call with the same signature, as the steps of a training loop do.
class CallHistory final {
public:
    // Return the signature that the next call is expected to have, or null.
    Signature* expected() const noexcept { return calls_[next_ % calls_.size()]; }

    // Add a call with this signature.
    void add(Signature& signature) noexcept {
        next_ = (expected() == &signature ? next_ : signature.latest) + 1;
        signature.latest = n_;
        calls_[n_++ % calls_.size()] = &signature;
    }

    void clear() noexcept { calls_.fill(nullptr); }

private:
    std::array<Signature*, std::size_t{1} << 14> calls_{};
    std::size_t n_ = 0;     // number of calls so far
    std::size_t next_ = 0;  // number of the earlier call that is expected to be repeated next
};

struct Signatures final {
    struct Slot final {
        std::uint64_t hash = 0;
        c10::intrusive_ptr<Signature> signature;
    };

    std::vector<Slot> slots{std::size_t{1} << 12};
    std::size_t n = 0;
    CallHistory history;

    void place(Slot slot) {
        std::size_t i = slot.hash & (slots.size() - 1);
        while (slots[i].signature) {
            i = (i + 1) & (slots.size() - 1);
        }
        slots[i] = std::move(slot);
    }

    void clear() {
        history.clear();
        slots.assign(slots.size(), Slot{});
        n = 0;
    }

    // Return the signature with the key `words`, or null.
    Signature* find(std::uint64_t hash, std::span<const std::int64_t> words) const noexcept {
        const std::size_t mask = slots.size() - 1;
        for (std::size_t i = hash & mask; slots[i].signature; i = (i + 1) & mask) {
            if (slots[i].hash == hash && std::ranges::equal(slots[i].signature->key, words)) {
                return slots[i].signature.get();
            }
        }
        return nullptr;
    }

    void add(Slot slot) {
        // A program with so many signatures keeps using new shapes or integers, so its old
        // signatures seldom return. Clear the cache then. Recipes keep the signatures that they
        // need alive.
        if (n > MOST_KEPT) {
            clear();
        }
        if (2 * ++n > slots.size()) {
            std::vector<Slot> before(2 * slots.size());
            before.swap(slots);
            for (Slot& each : before) {
                if (each.signature) {
                    place(std::move(each));
                }
            }
        }
        place(std::move(slot));
    }
};

[[gnu::always_inline]] inline Signatures& signatures() {
    static auto& made = leaky_singleton<Signatures>();
    return made;
}

}  // namespace

std::span<const std::int64_t> expected_key() noexcept {
    const Signature* expected = signatures().history.expected();
    return expected == nullptr ? std::span<const std::int64_t>() : expected->key;
}

c10::intrusive_ptr<Signature> signature_of(OperatorCall& call, ParsedCall& parsed) {
    Signatures& all = signatures();
    Signature* found = parsed.key.is_as_expected() ? all.history.expected() : nullptr;
    if (found == nullptr) [[unlikely]] {
        const std::uint64_t hash = hash_of(parsed.key.words());
        found = all.find(hash, parsed.key.words());
        if (found == nullptr) {
            auto made = c10::make_intrusive<Signature>(call.op, parsed, call.stack());
            found = made.get();
            all.add({hash, std::move(made)});
        }
    }
    all.history.add(*found);
    return c10::intrusive_ptr<Signature>::reclaim_copy(found);
}

std::size_t signatures_known() noexcept {
    return signatures().n;
}

void retry_kept_signatures() {
    for (const Signatures::Slot& each : signatures().slots) {
        if (each.signature) {
            each.signature->probation.reopen();
        }
    }
}

std::vector<const Signature*> all_signatures() {
    std::vector<const Signature*> found;
    for (const Signatures::Slot& each : signatures().slots) {
        if (each.signature) {
            found.push_back(each.signature.get());
        }
    }
    return found;
}

void fix_costs(Nanoseconds cost) noexcept {
    fixed_cost = cost;
    signatures().clear();
}

}  // namespace rekindle
