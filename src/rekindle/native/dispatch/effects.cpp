#include "effects.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "../memory/audit.h"
#include "../torch/arguments.h"
#include "../torch/dispatch_key.h"
#include "../torch/random.h"

namespace rekindle {

namespace {

Effects*& of_this_thread() noexcept {
    thread_local Effects* now = nullptr;
    return now;
}

// Call `visit` with the storage of each tensor in `values`, except for tensors without memory.
template <class F>
void each_home(std::span<const c10::IValue> values, F&& visit) {
    each_tensor(values, [&](std::uint32_t /*position*/, const at::Tensor& tensor) {
        if (tensor.defined() && has_memory(*tensor.unsafeGetTensorImpl())) {
            visit(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
        }
    });
}

}  // namespace

Effects::Watching::Watching(Effects* effects) noexcept : before_(of_this_thread()) {
    of_this_thread() = effects;
}

Effects::Watching::~Watching() {
    of_this_thread() = before_;
}

Effects* Effects::current() noexcept {
    return of_this_thread();
}

Effects::Effects(Driver& driver, std::span<const StoragePtr> inputs) : driver_(driver) {
    for (const StoragePtr& storage_impl : inputs) {
        const auto same = [&](const auto& other) {
            return other.first.get() == storage_impl.get();
        };
        if (std::ranges::none_of(checksums_, same)) {
            checksums_.emplace_back(storage_impl, checksum_of(storage_impl, driver.device));
        }
    }
    ++driver_.in_progress.observed;
}

Effects::~Effects() {
    --driver_.in_progress.observed;
}

void Effects::run(const Facts& facts, OperatorCall& call, Locked& lock) {
    const torch::jit::Stack& stack = call.stack();
    // do not check a composite operator: the operators that it calls pass through this function one
    // by one
    if (facts.composed) {
        lock.unlock();
        call.run();
        return;
    }
    look_at(facts, stack);
    std::vector<const c10::StorageImpl*> read;
    each_home(last_values(stack, facts.arguments), [&](const c10::StorageImpl* storage_impl) {
        read.push_back(storage_impl);
    });
    lock.unlock();
    {
        const c10::impl::ExcludeDispatchKeyGuard guard(KEY);
        call.run();
    }
    each_home(last_values(stack, facts.returns), [&](const c10::StorageImpl* storage_impl) {
        if (std::ranges::find(read, storage_impl) == read.end()) {
            made_.insert(storage_impl);
        }
    });
}

void Effects::look_at(const Facts& facts, const torch::jit::Stack& stack) {
    if (facts.talks || facts.unseen || facts.has(Traits::COLLECTIVE)) {
        found_ = "it communicates with other processes";
    }
    ParsedCall call(facts);
    call.take(stack);
    if (const at::Generator given = given_generator(call.unkeyed_args);
        given.defined() && given != default_generator(given.device())) {
        found_ = "it draws from a random number generator of its own";
    }
    for (const std::uint32_t position : call.written) {
        about_to_write(*call.tensors[position]);
    }
    const auto given = last_values(stack, facts.arguments);
    if (facts.moves && !given.empty() && given[0].isTensor()) {
        about_to_write(*given[0].toTensor().unsafeGetTensorImpl());
    }
}

// Handle a write to `tensor` by an operator inside the observed kernel. If the kernel did not make
// this memory, note the side effect, and register a write that has no recipe.
void Effects::about_to_write(const c10::TensorImpl& tensor) {
    if (!has_memory(tensor)) {
        return;
    }
    const c10::StorageImpl& storage_impl = *tensor.unsafe_storage().unsafeGetStorageImpl();
    if (made_.contains(&storage_impl)) {
        return;
    }
    found_ = "it writes to memory that it did not allocate";
    driver_.process_pending();
    const AddressEntry* there = driver_.find_by_address(storage_impl);
    StorageRecord* record = there == nullptr ? nullptr : there->record;
    if (record == nullptr) {
        return;
    }
    const Ref<Storage> kept(record);
    if (record->replayable) {
        driver_.record_external_write(*record).version.expected = -1;
        return;
    }
    if (record->consumed()) {
        driver_.forget(*record);
    }
    record->version.expected = -1;
}

const char* Effects::found() const {
    if (found_ != nullptr) {
        return found_;
    }
    const auto differs = [&](const auto& input) {
        return checksum_of(input.first, driver_.device) != input.second;
    };
    return std::ranges::any_of(checksums_, differs) ? "it writes to its arguments" : nullptr;
}

}  // namespace rekindle
