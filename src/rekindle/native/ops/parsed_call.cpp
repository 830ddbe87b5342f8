#include "parsed_call.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string_view>

#include "../torch/arguments.h"
#include "../torch/device.h"
#include "../torch/global_flags.h"
#include "../torch/parts.h"
#include "../torch/thread_state.h"

namespace rekindle {

namespace {

// Tags in the key of a signature, which is an array of words. The words for one argument begin with
// a word whose low byte is a tag. The higher bits of this word describe the argument.
struct Mark final {
    enum : std::int64_t {
        tensor = 1,
        undefined,
        extra,
        nothing,
        integer,
        yes,
        no,
        number,
        text,
        device,
        list,
        wrapped,
        other,
        over,
    };
};

std::int64_t bits_of(double number) noexcept {
    return std::bit_cast<std::int64_t>(number);
}

}  // namespace

void ParsedCall::take(const torch::jit::Stack& stack, c10::DispatchKeySet keys) {
    begin();
    for (const c10::IValue& value : last_values(stack, facts.arguments)) {
        add(value);
    }
    end();
    if (facts.has(Traits::STATISTICS | Traits::TRIED)) [[unlikely]] {
        if (facts.has(Traits::STATISTICS)) {
            take_statistics(stack);
        }
        if (facts.has(Traits::TRIED)) {
            take_state(keys);
        }
    }
}

void ParsedCall::begin() {
    sees_requires_grad_ = facts.has(Traits::SEES_REQUIRES_GRAD) && c10::GradMode::is_enabled();
    key.expect(expected_key());
    key.push_back(static_cast<std::int64_t>(std::bit_cast<std::uintptr_t>(&facts)));
    key.push_back(global_flags());
    const bool only_matrix = facts.products == Products::matrix;
    key.push_back(facts.products == Products::none ? 0 : product_flags(only_matrix));
}

void ParsedCall::end() {
    // Without tensor arguments, doubles decide the size of the result, as in arange(0.0, 1.0, 0.1).
    if (tensors.empty()) [[unlikely]] {
        for (const c10::IValue& extra : unkeyed_args) {
            if (extra.isDouble()) {
                key.push_back(bits_of(extra.toDouble()));
            }
        }
    }
}

void ParsedCall::take_over() {
    takes_over = true;
    // Only calls whose result is written over their first argument have this word in their key.
    key.push_back(Mark::over);
    written.push_back(0);
}

void ParsedCall::leave_first() {
    takes_over = false;
    key.pop_back();
    written.pop_back();
}

// NOLINTNEXTLINE(misc-no-recursion): no list has lists in it
void ParsedCall::take_argument(const c10::IValue& value) {
    if (value.isTensor()) {
        take_argument(value.toTensor());
    } else if (value.isNone()) {
        take_nothing();
    } else if (value.isInt()) {
        take_argument(value.toInt());
    } else if (value.isBool()) {
        take_argument(value.toBool());
    } else if (value.isDouble() || value.isGenerator() || value.isComplexDouble()) {
        key.push_back(Mark::extra);
        unkeyed_args.push_back(value);
    } else if (value.isList()) {
        take_list(value);
    } else if (value.isString()) {
        take_argument(value.toStringView());
    } else if (value.isDevice()) {
        const c10::Device device = value.toDevice();
        key.push_back(
            Mark::device | static_cast<std::int64_t>(device.type()) << 8 |
            static_cast<std::int64_t>(device.index() + 1) << 24
        );
        opaque = opaque || (device.type() != c10::DeviceType::CPU && device.type() != ACCELERATOR);
    } else {
        key.push_back(Mark::other);
        opaque = true;
    }
}

void ParsedCall::take_nothing() {
    key.push_back(Mark::nothing);
}

void ParsedCall::take_argument(const at::Tensor& tensor) {
    take_tensor(tensor, position_ < 64 && (facts.written >> position_ & 1) != 0);
}

void ParsedCall::take_argument(const c10::Scalar& number) {
    take_argument(c10::IValue(number));
}

void ParsedCall::take_argument(std::int64_t number) {
    key.push_back(Mark::integer);
    key.push_back(number);
}

void ParsedCall::take_argument(bool flag) {
    key.push_back(flag ? Mark::yes : Mark::no);
}

void ParsedCall::take_argument(c10::ScalarType dtype) {
    take_argument(static_cast<std::int64_t>(dtype));
}

void ParsedCall::take_argument(c10::IntArrayRef numbers) {
    key.push_back(Mark::list | static_cast<std::int64_t>(numbers.size()) << 8);
    for (const std::int64_t number : numbers) {
        take_argument(number);
    }
}

// NOLINTNEXTLINE(misc-no-recursion): no list has lists in it
void ParsedCall::take_tensor(const at::Tensor& tensor, bool is_written) {
    if (!tensor.defined()) [[unlikely]] {
        key.push_back(Mark::undefined);
        return;
    }
    c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    if (impl.is_wrapped_number() && !is_written && take_wrapped(impl)) [[unlikely]] {
        return;
    }
    if (!is_plain(impl)) [[unlikely]] {
        opaque = true;
        if (!has_memory(impl)) {
            key.push_back(Mark::other);
            for (const at::Tensor& part : parts_of(tensor)) {
                parts.push_back(part);
                take_tensor(part, is_written);
            }
            return;
        }
    }
    if (is_written) {
        written.push_back(static_cast<std::uint32_t>(tensors.size()));
    }
    tensors.push_back(&impl);
    const c10::IntArrayRef sizes = impl.sizes();
    const c10::IntArrayRef strides = impl.strides();
    const bool asks = sees_requires_grad_ && impl.requires_grad();
    const bool there = impl.device_type() == ACCELERATOR;
    const std::int64_t device = there ? impl.device().index() + 1 : 0;
    // The tensor is strided, so its dispatch keys tell: `is_conj()` would ask for the layout first.
    const c10::DispatchKeySet keys = impl.key_set();
    key.push_tensor(
        Mark::tensor | static_cast<std::int64_t>(c10::typeMetaToScalarType(impl.dtype())) << 8 |
            device << 16 | static_cast<std::int64_t>(keys.has(c10::DispatchKey::Conjugate)) << 24 |
            static_cast<std::int64_t>(keys.has(c10::DispatchKey::Negative)) << 25 |
            static_cast<std::int64_t>(asks) << 26 | static_cast<std::int64_t>(sizes.size()) << 32,
        impl.storage_offset(),
        sizes,
        strides
    );
}

// Parse a Python number that PyTorch wrapped into a tensor: copy the number, and do not count the
// tensor's memory. Return false if `tensor` is no such number.
bool ParsedCall::take_wrapped(const c10::TensorImpl& tensor) {
    if (tensor.dim() != 0 || !is_plain(tensor) || !tensor.is_cpu() || tensor.is_conj() ||
        tensor.is_neg()) {
        return false;
    }
    const void* data = tensor.data();
    switch (c10::typeMetaToScalarType(tensor.dtype())) {
        case c10::ScalarType::Double:
            unkeyed_args.emplace_back(*static_cast<const double*>(data));
            key.push_back(Mark::wrapped | 1 << 8);
            return true;
        case c10::ScalarType::Long:
            unkeyed_args.emplace_back(*static_cast<const std::int64_t*>(data));
            key.push_back(Mark::wrapped | 2 << 8);
            return true;
        case c10::ScalarType::Bool:
            unkeyed_args.emplace_back(*static_cast<const bool*>(data));
            key.push_back(Mark::wrapped | 3 << 8);
            return true;
        case c10::ScalarType::ComplexDouble:
            unkeyed_args.emplace_back(*static_cast<const c10::complex<double>*>(data));
            key.push_back(Mark::wrapped | 4 << 8);
            return true;
        default:
            return false;
    }
}

// NOLINTNEXTLINE(misc-no-recursion): no list has lists in it
void ParsedCall::take_list(const c10::IValue& value) {
    const auto items = value.toListRef();
    key.push_back(Mark::list | static_cast<std::int64_t>(items.size()) << 8);
    opaque = opaque || value.isComplexDoubleList();
    // A list of doubles holds the scale factors of an interpolation, which decide the size of the
    // result.
    if (value.isDoubleList()) {
        for (const c10::IValue& item : items) {
            key.push_back(Mark::number);
            key.push_back(bits_of(item.toDouble()));
        }
        return;
    }
    for (const c10::IValue& item : items) {
        // The item is a list of tensors, an argument of a collective. Parse the tensors, because
        // the collective may write them.
        if (item.isList()) {
            opaque = true;
            take_list(item);
        } else {
            take_argument(item);
        }
    }
}

void ParsedCall::take_argument(std::string_view text) {
    key.push_back(Mark::text | static_cast<std::int64_t>(text.size()) << 8);
    while (!text.empty()) {
        std::int64_t word = 0;
        const std::size_t length = std::min(text.size(), sizeof(word));
        std::memcpy(&word, text.data(), length);
        key.push_back(word);
        text.remove_prefix(length);
    }
}

// Add to the key what decides what the body of an operator does that is not PyTorch's own: numbers
// among its arguments, and the state of the thread. The state is the last part of the key.
void ParsedCall::take_state(c10::DispatchKeySet keys) {
    for (const c10::IValue& extra : unkeyed_args) {
        if (extra.isScalar()) {
            const c10::complex<double> number = extra.toScalar().toComplexDouble();
            key.push_back(bits_of(number.real()));
            key.push_back(bits_of(number.imag()));
        }
    }
    for (const std::int64_t word : ThreadState::words(keys)) {
        key.push_back(word);
    }
}

// Find the running statistics that this call writes although the operator's schema does not say so
// (R6, hidden writes).
void ParsedCall::take_statistics(const torch::jit::Stack& stack) {
    const auto given = last_values(stack, facts.arguments);
    const auto [mean, variance, training] = facts.traits.statistics;
    if (mean < 0) {
        return;  // The table has no positions for this operator, so its schema is right.
    }
    written.clear();
    const auto n = static_cast<int>(facts.arguments);
    if (training >= 0 && training < n && given[static_cast<std::size_t>(training)].isBool() &&
        !given[static_cast<std::size_t>(training)].toBool()) {
        return;
    }
    for (const int position : {mean, variance}) {
        if (position < 0 || position >= n ||
            !given[static_cast<std::size_t>(position)].isTensor()) {
            continue;
        }
        const at::Tensor& target = given[static_cast<std::size_t>(position)].toTensor();
        for (std::uint32_t i = 0; i < tensors.size(); ++i) {
            if (target.defined() && tensors[i] == target.unsafeGetTensorImpl()) {
                written.push_back(i);
                break;
            }
        }
    }
    std::ranges::sort(written);
}

}  // namespace rekindle
