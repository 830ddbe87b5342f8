#include "several_calls.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "../torch/arguments.h"
#include "../torch/geometry.h"

namespace rekindle {

namespace {

// Parts of a list: part `i` begins at position `starts[i]`, and ends where the next one begins.
using Starts = std::vector<std::size_t>;

// Return true if the argument has one item for each tensor of a list of length `n`.
bool is_by_item(const c10::IValue& value, std::size_t n) {
    return value.isList() && value.toListRef().size() == n;
}

// Return the bytes of the storage of `value`, if it is a tensor with memory.
Bytes bytes_of(const c10::IValue& value) {
    if (!value.isTensor() || !value.toTensor().defined() ||
        !has_memory(*value.toTensor().unsafeGetTensorImpl())) {
        return 0;
    }
    return static_cast<Bytes>(value.toTensor().storage().nbytes());
}

// Return true if an argument that is no list may have one number for each tensor of a list, as in
// `_foreach_addcmul(list, list, list, Tensor scalars)`.
bool has_numbers_by_item(std::span<const c10::IValue> given) {
    return std::ranges::any_of(given, [](const c10::IValue& each) {
        return each.isTensor() && each.toTensor().defined() && each.toTensor().dim() != 0 &&
               each.toTensor().numel() != 1;
    });
}

// Return the bytes of the operands at each position of the lists, and of the results if the
// operator makes new tensors.
std::vector<Bytes> bytes_by_item(
    const Facts& facts, std::span<const c10::IValue> given, std::size_t n
) {
    std::vector<Bytes> bytes(n, 0);
    for (const c10::IValue& value : given) {
        if (!is_by_item(value, n)) {
            continue;
        }
        for (std::size_t i = 0; i < n; ++i) {
            bytes[i] += bytes_of(value.toListRef()[i]);
        }
    }
    for (std::size_t i = 0; i < n && facts.returns != 0; ++i) {
        bytes[i] += bytes_of(given[0].toListRef()[i]);
    }
    return bytes;
}

// Cut the list into parts of at most `most` bytes. A part has at least one item.
Starts cut(const std::vector<Bytes>& bytes, Bytes most) {
    Starts starts{0};
    Bytes part = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        if (part != 0 && part + bytes[i] > most) {
            starts.push_back(i);
            part = 0;
        }
        part += bytes[i];
    }
    return starts;
}

// Return the items of the list `value` from `begin` to `end`.
c10::IValue part_of(const c10::IValue& value, std::size_t begin, std::size_t end) {
    const auto part = value.toList().copy();  // an empty list of the same type
    part.clear();
    for (std::size_t i = begin; i < end; ++i) {
        part.push_back(value.toListRef()[i]);
    }
    return part;
}

}  // namespace

bool run_list_in_parts(
    Session& session,
    const Facts& facts,
    OperatorCall& call,
    Locked& lock,
    c10::function_ref<void(OperatorCall&)> run
) {
    const bool moves = session.held.eviction && session.held.eviction->open &&
                       session.held.eviction->moves() && session.engine.budget != UNLIMITED;
    if (!moves) {
        return false;
    }
    torch::jit::Stack& stack = call.stack();
    const std::span<const c10::IValue> given = last_values(stack, facts.arguments);
    const std::size_t n = given[0].toListRef().size();
    if (n < 2 || has_numbers_by_item(given)) {
        return false;
    }
    const std::vector<Bytes> bytes = bytes_by_item(facts, given, n);
    Bytes total = 0;
    for (const Bytes each : bytes) {
        total += each;
    }
    if (total <= session.engine.budget / 2) {
        return false;
    }
    const Starts starts = cut(bytes, session.engine.budget / 4);
    if (starts.size() == 1) {  // one tensor has nearly all bytes
        return false;
    }
    lock.unlock();
    std::vector<c10::IValue> results;
    for (std::size_t i = 0; i < starts.size(); ++i) {
        const std::size_t end = i + 1 < starts.size() ? starts[i + 1] : n;
        torch::jit::Stack part;
        for (const c10::IValue& value : given) {
            part.push_back(is_by_item(value, n) ? part_of(value, starts[i], end) : value);
        }
        BoxedCall called(call.op, call.keys, &part);
        run(called);
        if (facts.returns != 0) {
            const auto made = part.back().toListRef();
            results.insert(results.end(), made.begin(), made.end());
        }
    }
    torch::jit::drop(stack, facts.arguments);
    if (facts.returns != 0) {
        std::vector<at::Tensor> all;
        all.reserve(results.size());
        for (const c10::IValue& each : results) {
            all.push_back(each.toTensor());
        }
        stack.emplace_back(std::move(all));
    }
    return true;
}

}  // namespace rekindle
