// Tries operators that may give other bits when they are recomputed. A trial runs the operator a
// second time while its first results are in memory, and compares both. Only if they are equal do
// the first results get a recipe.
#include "trial.h"

#include <ATen/ops/equal.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "../base/clock.h"
#include "../memory/records/recipe.h"
#include "../ops/call_again.h"
#include "../ops/kernel_operands.h"
#include "../torch/arguments.h"
#include "../torch/raised.h"
#include "../torch/replay_dispatch_guard.h"
#include "../torch/storage_ptr.h"
#include "operation.h"
#include "running.h"

namespace rekindle {

namespace {

constexpr int ONCE = 1;
// Number of trials with equal bits that are required of operators with atomic additions: the order
// of the additions may differ in any run.
constexpr int SEVERAL = 3;
// Number of signatures of one operator that are tried in their first call. Later ones are tried in
// their second call.
constexpr int AT_ONCE = 64;

Probation& of_last_unit() noexcept {
    thread_local Probation known;
    return known;
}

std::vector<at::Tensor> tensors_in(std::span<const c10::IValue> values) {
    std::vector<at::Tensor> found;
    each_tensor(values, [&](std::uint32_t /*position*/, const at::Tensor& tensor) {
        found.push_back(tensor);
    });
    return found;
}

bool is_among(const StoragePtr& storage_impl, std::span<const StoragePtr> storages) {
    return std::ranges::any_of(storages, [&](const StoragePtr& each) {
        return each.get() == storage_impl.get();
    });
}

bool same_geometry(const c10::TensorImpl& one, const c10::TensorImpl& other) {
    return one.dtype() == other.dtype() && one.sizes() == other.sizes() &&
           one.strides() == other.strides() && one.storage_offset() == other.storage_offset() &&
           one.is_conj() == other.is_conj() && one.is_neg() == other.is_neg();
}

// Return the bytes of `tensor` as a one-dimensional tensor, to compare two results bit by bit.
at::Tensor bytes_of(const at::Tensor& tensor) {
    Geometry geometry = Geometry::of(*tensor.unsafeGetTensorImpl());
    geometry.conjugate = false;
    geometry.negative = false;
    const bool dense = tensor.is_non_overlapping_and_dense();
    if (dense) {
        geometry.strides.assign(1, 1);
        geometry.sizes.assign(1, tensor.numel());
    }
    const at::Tensor row = geometry.in(storage_of(*tensor.unsafeGetTensorImpl()));
    return (dense ? row : row.contiguous().view(-1)).view(at::kByte);
}

bool same_bits(const at::Tensor& one, const at::Tensor& other) {
    // The second run of the operator is Rekindle's, so the program's profiler must not show it.
    const at::DisableRecordFunctionGuard unseen;
    const ReplayDispatchGuard guard(false);
    return one.numel() == 0 || at::equal(bytes_of(one), bytes_of(other));
}

}  // namespace

const char* difference(
    std::span<const c10::IValue> first,
    std::span<const c10::IValue> again,
    std::span<const StoragePtr> inputs
) {
    constexpr const char* others = "it gives other results when it is recomputed";
    constexpr const char* elsewhere = "it returns memory that it also keeps for itself";
    const std::vector<at::Tensor> before = tensors_in(first);
    const std::vector<at::Tensor> now = tensors_in(again);
    if (before.size() != now.size()) {
        return others;
    }
    c10::SmallVector<StoragePtr, 4> made;
    for (const at::Tensor& each : before) {
        if (each.defined()) {
            made.push_back(storage_of(*each.unsafeGetTensorImpl()));
        }
    }
    for (std::size_t i = 0; i < before.size(); ++i) {
        if (before[i].defined() != now[i].defined()) {
            return others;
        }
        if (!before[i].defined()) {
            continue;
        }
        if (!is_plain(*now[i].unsafeGetTensorImpl()) ||
            !same_geometry(*before[i].unsafeGetTensorImpl(), *now[i].unsafeGetTensorImpl())) {
            return others;
        }
        const StoragePtr there = storage_of(*before[i].unsafeGetTensorImpl());
        const StoragePtr here = storage_of(*now[i].unsafeGetTensorImpl());
        const bool given = is_among(there, inputs);
        if (given ? here.get() != there.get() : is_among(here, made) || is_among(here, inputs)) {
            return elsewhere;
        }
        if (!given && !same_bits(before[i], now[i])) {
            return "the bits of its results differ when it is recomputed";
        }
    }
    return nullptr;
}

void note_unit(const Probation& probation) {
    of_last_unit() = probation;
}

const Probation& last_unit() noexcept {
    return of_last_unit();
}

// -- deciding which calls are tried ---------------------------------------------------------------

// Return true if a call that may give other bits gets a recipe anyway, or will first run a second
// time on trial. A call that writes its arguments or advances a random state of its own is never
// tried, because a second run would be a side effect.
bool Operation::is_trusted_or_tried() {
    if (!facts_.returns_tensors) {
        return false;
    }
    const bool is_tried = facts_.has(Traits::TRIED);
    const Bytes nbytes = std::max<Bytes>(0, parsed_.signature->needed);
    if (!parsed_.written.empty() || facts_.writes || facts_.rng_state_args != 0) {
        if (is_tried) {
            session_.observers.kept_calls.add(facts_, "it writes to its arguments", nbytes);
        }
        return false;
    }
    Probation& probation = parsed_.signature->probation;
    if (probation.is_kept()) {
        session_.observers.kept_calls.add(facts_, probation.why(), nbytes);
        return false;
    }
    // A program whose calls never repeat would pay for a second run of each call.
    if (is_tried && !facts_.unit && probation.is_new() && facts_.tried++ >= AT_ONCE) {
        probation.skip_one();
    }
    tried_ = !probation.is_trusted() && probation.is_due();
    if (!tried_ && !probation.is_trusted()) {
        session_.observers.kept_calls.add(
            facts_, "no later call with these arguments was tried", nbytes
        );
    }
    return tried_ || probation.is_trusted();
}

// Watch the kernel of an operator that is not PyTorch's own for side effects, unless its
// recomputation is trusted.
void Operation::look_for_effects() {
    const Probation& probation = parsed_.signature->probation;
    if (probation.is_trusted() || !(facts_.unit || tried_ || probation.is_watched())) {
        return;
    }
    c10::SmallVector<StoragePtr, 6> storages;
    if (tried_ && recording_) {
        for (const Ref<Storage>& each : inputs_) {
            if (StoragePtr storage_impl = record_of(*each).at()) {
                storages.push_back(std::move(storage_impl));
            }
        }
    }
    Effects& effects = rare().effects.emplace(session_, storages);
    if (tried_ && recording_) {
        effects.expect(facts_, boxed_arguments());
    } else if (probation.writes()) {
        for (const c10::TensorImpl* tensor : parsed_.tensors) {
            effects.about_to_write(*tensor, facts_.name);
        }
    }
}

// Return true if the state of `checkpoint`'s generator differs from its state before the operator
// ran.
bool Operation::has_moved(const RngCheckpoint& checkpoint) const {
    const at::Generator& generator = checkpoint.generator();
    if (checkpoint.is_on_device()) {
        const PhiloxState before = PhiloxState::of(checkpoint.copy());
        const PhiloxState now = PhiloxState::of(generator);
        return now.seed != before.seed || now.offset != before.offset;
    }
    const auto same = [&](const std::unique_ptr<Random>& before) {
        return before->generator() == generator && before->is_at(Random(generator));
    };
    return std::ranges::none_of(rare_->before, same);
}

// Forget the states of the generators that the operator did not move. Its recipe sets the others.
void Operation::keep_moved_generators() {
    if (!rare_) {
        return;
    }
    RngCheckpoints moved;
    std::ptrdiff_t on_host = 0;
    for (std::unique_ptr<RngCheckpoint>& each : rare_->random) {
        if (has_moved(*each)) {
            on_host += each->is_on_device() ? 0 : 1;
            moved.push_back(std::move(each));
        }
    }
    rare_->random = std::move(moved);
    rare_->before.clear();
    if (on_host > 1) {
        parsed_.signature->probation.failed("it draws from several random number generators");
    }
}

// After a run of an operator that is not trusted, look for side effects, and run the operator a
// second time if a trial is due. The call gets a recipe only if its signature is trusted after
// that.
void Operation::stand_trial() {
    if (facts_.has(Traits::TRIED)) {
        keep_moved_generators();
    }
    Probation& probation = parsed_.signature->probation;
    if (!tried_ && effects() == nullptr) {
        recording_ = recording_ && probation.is_trusted();
        return;
    }
    const Results results = gather_results();
    const std::string why = effects() != nullptr ? effects()->found() : "";
    if (!why.empty()) {
        probation.failed(why);
        effects()->report_to(probation);
    } else if (tried_ && recording_ && !probation.is_kept() && inputs_can_be_had()) {
        if (results.non_strided_result || results.external) {
            probation.failed("its results are sparse, or PyTorch did not allocate their memory");
        } else if (find_room_for_trial(results.nbytes)) {
            try_again();
        } else {
            probation.postponed();
        }
    }
    if (tried_ && probation.is_kept()) {
        session_.observers.kept_calls.add(facts_, probation.why(), results.nbytes);
    }
    recording_ = recording_ && probation.is_trusted();
}

// Make room for the results of a second run, and for the comparison. The first results are in
// memory, but not counted yet. If there is no room, return false instead of raising.
bool Operation::find_room_for_trial(Bytes nbytes) {
    const Bytes compared = session_.device.queues() ? nbytes : 0;
    needed_ = 2 * nbytes + compared;
    // Measured by now, if this was the first call.
    inside_ = session_.room.reserves_for_operators() ? parsed_.signature->workspace : 0;
    if (!fits()) {
        session_.room.clear(needed_ + inside_ + session_.room.kept_back(needed_ + inside_));
    }
    return fits();
}

void Operation::try_again() {
    Signature& signature = *parsed_.signature;
    Probation& probation = signature.probation;
    c10::SmallVector<StoragePtr, 6> storages;
    std::vector<at::Tensor> tensors;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
        const StoragePtr storage_impl = input(i)->at();
        if (!storage_impl) {
            return;  // the program has freed this input, so a later call is tried instead
        }
        storages.push_back(storage_impl);
        tensors.push_back(signature.geometries[i].in(storage_impl));
    }
    ++session_.in_progress.started;
    torch::jit::Stack again;
    Nanoseconds elapsed = 0;
    try {
        const KernelOperands operands{std::span<const StoragePtr>(storages)};
        const Running running(session_, needed_ + inside_, !facts_.is_aten);
        const Unlocked others(lock_);
        again = call_again(
            signature,
            tensors,
            parsed_.unkeyed_args,
            random(),
            c10::GradMode::is_enabled(),
            [&](c10::function_ref<void()> kernel) {
                const Nanoseconds started = now_ns();
                kernel();
                elapsed = now_ns() - started;
            }
        );
    } catch (std::exception& error) {
        session_.registry.drain();
        if (ends_the_program(error)) {
            interrupted(error);
            throw;
        }
        if (is_device_oom(error)) {
            probation.postponed();
        } else {
            probation.failed("run again, it says: " + message_of(error));
        }
        return;
    }
    session_.registry.drain();
    if (!session_.device.queues()) {
        signature.sample(elapsed);  // the first run took longer, because it was watched
    }
    compare_runs(again, storages);
}

// Trust the signature if the second run, whose results are on the stack `again`, did what the first
// one did. storages: the memory of the operands.
void Operation::compare_runs(const torch::jit::Stack& again, std::span<const StoragePtr> storages) {
    Probation& probation = parsed_.signature->probation;
    if (const std::string why = effects() != nullptr ? effects()->found() : ""; !why.empty()) {
        probation.failed(why);
        effects()->report_to(probation);
        return;
    }
    const char* why = nullptr;
    {
        const Unlocked others(lock_);  // the kernel of `equal` may be the program's own code
        why = difference(returned(), last_values(again, facts_.returns), storages);
    }
    session_.registry.drain();
    if (why != nullptr) {
        probation.failed(why);
        return;
    }
    probation.passed(facts_.has(Traits::ATOMICS | Traits::ACCUMULATES) ? SEVERAL : ONCE);
}

}  // namespace rekindle
