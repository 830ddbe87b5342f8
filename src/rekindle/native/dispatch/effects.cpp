#include "effects.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "../memory/evict_held_last.h"
#include "../memory/held/held_eviction.h"
#include "../memory/notify.h"
#include "../memory/observers/audit.h"
#include "../torch/arguments.h"
#include "../torch/dispatch_key.h"
#include "../torch/raised.h"
#include "../torch/random.h"
#include "trial.h"

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

Effects::Watching::Watching(Effects* effects) : effects_(effects), before_(of_this_thread()) {
    if (effects != nullptr && !effects->name_.empty() && effects->found_.empty()) {
        python_ = true;
        effects->found_ = watch_begins(effects->name_.c_str());
    }
    of_this_thread() = effects;
}

void Effects::Watching::end() {
    of_this_thread() = before_;
    if (std::exchange(python_, false)) {
        std::string found = watch_ends(effects_->read_.c_str());
        effects_->found_ = effects_->found_.empty() ? std::move(found) : effects_->found_;
    }
}

Effects::Watching::~Watching() {
    without_throwing([&] { end(); });
}

Effects* Effects::current() noexcept {
    return of_this_thread();
}

Effects::Effects(Session& session, std::span<const StoragePtr> inputs) : session_(session) {
    for (const StoragePtr& storage_impl : inputs) {
        const auto same = [&](const auto& other) {
            return other.first.get() == storage_impl.get();
        };
        if (std::ranges::none_of(checksums_, same)) {
            checksums_.emplace_back(storage_impl, checksum_of(storage_impl, session.device));
        }
    }
    ++session_.in_progress.observed;
}

Effects::~Effects() {
    --session_.in_progress.observed;
}

void Effects::expect(const Facts& facts, std::span<const c10::IValue> arguments) {
    name_ = facts.name;
    generator_ = given_generator(arguments);
    if (facts.region || facts.unit) {
        return;
    }
    given_.emplace();
    each_home(arguments, [&](const c10::StorageImpl* storage_impl) {
        given_->insert(storage_impl);
    });
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
    // The body may read a tensor that was evicted while a variable of the program holds it.
    each_tensor(last_values(stack, facts.arguments), [&](std::uint32_t, const at::Tensor& each) {
        if (each.defined()) {
            bring_back(session_, lock, *each.unsafeGetTensorImpl());
        }
    });
    std::vector<const c10::StorageImpl*> read;
    each_home(last_values(stack, facts.arguments), [&](const c10::StorageImpl* storage_impl) {
        read.push_back(storage_impl);
    });
    if (facts.name == "aten::lift_fresh") {
        made_.insert(read.begin(), read.end());  // the memory of `torch.tensor(...)`
    }
    look_at(facts, call);
    lock.unlock();
    if (facts.has(Traits::TRIED)) {
        call.run();  // its body may have effects as well
        if (facts.unit) {
            note_unit({});  // nothing was tried
        }
    } else {
        const c10::impl::ExcludeDispatchKeyGuard guard(KEY);
        call.run();
    }
    each_home(last_values(stack, facts.returns), [&](const c10::StorageImpl* storage_impl) {
        if (std::ranges::find(read, storage_impl) == read.end()) {
            made_.insert(storage_impl);
        }
    });
}

void Effects::look_at(const Facts& facts, OperatorCall& call) {
    if (facts.talks || facts.unseen || facts.has(Traits::COLLECTIVE)) {
        found_ = "it communicates with other processes";
    }
    ParsedCall parsed(facts);
    parsed.take(call.stack(), call.keys);
    if (const at::Generator given = given_generator(parsed.unkeyed_args);
        given.defined() && given != generator_ && given != default_generator(given.device())) {
        found_ = "it draws from a random number generator of its own";
    }
    for (const std::uint32_t position : parsed.written) {
        about_to_write(*parsed.tensors[position], facts.name);
    }
    const auto given = last_values(call.stack(), facts.arguments);
    if (facts.moves && !given.empty() && given[0].isTensor()) {
        about_to_write(*given[0].toTensor().unsafeGetTensorImpl(), facts.name);
    }
    const bool reads = !facts.view && facts.content == 0 && !facts.has(Traits::QUERY);
    if (reads && given_ && read_.empty() &&
        !std::ranges::all_of(parsed.tensors, [&](const auto* each) { return is_given(*each); })) {
        read_ = facts.name;
    }
}

// Return true if the observed kernel may read `tensor`, because it made the tensor, or because the
// tensor is an argument. A single number that no operator made is a constant in the kernel's code.
bool Effects::is_given(const c10::TensorImpl& tensor) const {
    if (!has_memory(tensor)) {
        return true;
    }
    const c10::StorageImpl* storage_impl = tensor.unsafe_storage().unsafeGetStorageImpl();
    return made_.contains(storage_impl) || (given_ && given_->contains(storage_impl)) ||
           (tensor.dim() == 0 && session_.registry.find(*storage_impl) == nullptr);
}

// Handle a write to `tensor` by an operator inside the observed kernel. If the kernel did not make
// this memory, note the side effect, and register a write that has no recipe.
void Effects::about_to_write(const c10::TensorImpl& tensor, const std::string& name) {
    if (!has_memory(tensor)) {
        return;
    }
    const c10::StorageImpl& storage_impl = *tensor.unsafe_storage().unsafeGetStorageImpl();
    if (made_.contains(&storage_impl)) {
        return;
    }
    found_ = "it writes to memory that it did not allocate (" + name + ")";
    has_written_ = true;
    session_.frees.process_pending();
    StorageRecord* record = session_.registry.find_record(storage_impl);
    if (record == nullptr) {
        return;
    }
    const Ref<Storage> kept(record);
    session_.events.about_to_write(*record);
    if (record->replayable) {
        session_.storages.record_external_write(*record).version.expected = -1;
        return;
    }
    if (record->consumed()) {
        session_.sources.forget(*record);
    }
    record->version.expected = -1;
}

// Register that the kernel wrote an argument in a way that no operator shows. It is too late to
// recompute the values that need the old contents. So recomputing one of them raises.
void Effects::has_changed(const StoragePtr& storage_impl) {
    has_changed_ = true;
    session_.frees.process_pending();
    StorageRecord* record = session_.registry.find_record(*storage_impl);
    if (record == nullptr) {
        return;
    }
    const Ref<Storage> kept(record);
    if (record->replayable) {
        session_.storages.record_external_write(*record).version.expected = -1;
    } else if (record->consumed()) {
        record->version.expected = record->version.now() + 1;
    }
}

void Effects::report_to(Probation& probation) const {
    if (has_written_ || has_changed_ || !read_.empty()) {
        probation.watch(has_changed_);
    }
}

std::string Effects::found() {
    for (auto& [storage_impl, checksum] : checksums_) {
        if (const std::uint64_t now = checksum_of(storage_impl, session_.device); now != checksum) {
            checksum = now;
            if (!has_written_) {
                has_changed(storage_impl);
            }
            found_ = found_.empty() ? "it writes to its arguments" : found_;
        }
    }
    return found_;
}

}  // namespace rekindle
