// Runs the kernel of an operator: measures its time and workspace, and repeats it after a device
// OOM.
#include <ATen/Context.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <mutex>
#include <optional>

#include "../allocator/arena.h"
#include "../base/clock.h"
#include "../memory/notify.h"
#include "../ops/kernel_operands.h"
#include "../ops/workspaces.h"
#include "../steps/learner.h"
#include "../torch/arguments.h"
#include "../torch/dispatch_key.h"
#include "../torch/global_flags.h"
#include "../torch/raised.h"
#include "operation.h"
#include "running.h"

namespace rekindle {

// Report this operator to the learner, which compares the running training step with its learned
// plans.
void Operation::register_tensor() {
    Learner* following = learner_of(session_);
    if (following == nullptr || session_.events.only_counting.on() || !following->watches()) {
        return;
    }
    Learner& learner = *following;
    const std::int64_t op_id = op_id_of(parsed_);
    if (learner.asks(op_id)) {
        {
            const Unlocked others(lock_);
            request_plans(session_.observers, op_id);
        }
        session_.registry.drain();
    }
    learner.observe(op_id, parsed_);
}

namespace {

// Return true if Rekindle's allocator may refuse memory to a kernel: the bytes of its workspace or
// of its results are unknown.
bool is_limited(const Session& session, const Facts& facts, const Signature& signature) {
    if (signature.watched != 0 && !facts.dynamic) [[likely]] {
        return false;
    }
    return !session.device.queues() && session.device.guesses &&
           session.room.reserves_for_operators() && session.engine.budget != UNLIMITED;
}

// Return the bytes that an operator may have, results included, before it counts as running.
Bytes room_inside(const Session& session) {
    return session.engine.budget - session.engine.memory - session.engine.in_flight;
}

// A running kernel needs `wanted` bytes so far, and `counted` bytes count while it runs. Evict
// values to make room for it, and return the bytes that it may have.
Bytes clear_inside(Session& session, Bytes wanted, Bytes counted) {
    session.registry.drain();
    // A policy in Python cannot run here: the kernel may hold locks.
    if (session.own_policy == nullptr && wanted > counted) {
        session.room.clear(wanted - counted);
    }
    return room_inside(session) + counted;
}

// Return true if another thread could recompute a value from what the call writes. `inputs` is
// empty if the operator is only counted: it then writes nothing of the kind.
bool writes_what_is_needed(
    const ParsedCall& parsed, std::span<const Ref<Storage>> inputs, const InProgress& in_progress
) {
    return !inputs.empty() && std::ranges::any_of(parsed.written, [&](std::uint32_t position) {
        const Ref<Storage>& each = inputs[position];
        return each && in_progress.may_read(record_of(*each));
    });
}

}  // namespace

// Return true if the kernel can run again after its allocator has refused memory: it writes
// nothing, draws no random numbers and runs no code of the program.
bool Operation::may_be_refused() const {
    return is_limited(session_, facts_, *parsed_.signature) && facts_.is_aten && !facts_.writes &&
           !facts_.random && !facts_.opaque && !parsed_.signature->takes_over;
}

// Return true if the operator may run again after a device OOM. An operator that is not PyTorch's
// own may do so only once trials have shown that it has no side effects.
bool Operation::may_run_again() const {
    return facts_.retryable_after_oom &&
           (!facts_.has(Traits::TRIED) || parsed_.signature->probation.is_trusted());
}

// Rekindle's allocator has refused memory to the running kernel. Evict values until the `nbytes`
// fit that the kernel needs at least. If that is impossible, throw `OutOfBudgetError` with the
// bytes that the kernel probably needs, or return false if hardly any bytes are missing.
bool Operation::find_room_inside(Bytes nbytes) {
    try {
        retry_evicting_held([&] { session_.room.make_room(nbytes, facts_.name.c_str()); });
        return true;
    } catch (OutOfBudgetError& shortage) {
        // Smaller workspaces are not counted in later calls either.
        if (nbytes < needed_ + NOTICED && shortage.memory + needed_ <= shortage.budget) {
            return false;
        }
        shortage.inside = nbytes - needed_;
        shortage.likely = likely_need(*parsed_.signature, needed_, nbytes, session_.device);
        interrupted(shortage);
        throw;
    } catch (std::exception& error) {
        interrupted(error);
        throw;
    }
}

// Run the kernel with the session mutex released. If the budget or the device refuses memory to the
// kernel, evict values and, if possible, run the kernel again.
void Operation::call() {
    const bool refusable = may_be_refused();
    if (refusable || (session_.device.queues() && may_run_again())) [[unlikely]] {
        call_until_it_fits(refusable);
        started_ = true;
    } else {
        started_ = true;
        // A kernel that cannot run again is stopped if its memory does not fit, also after
        // evictions.
        const bool limited = is_limited(session_, facts_, *parsed_.signature);
        const Bytes refused = attempt(limited ? room_inside(session_) : UNLIMITED, nullptr);
        if (refused == 0) [[likely]] {
            return;
        }
        const Engine& engine = session_.engine;
        OutOfBudgetError shortage{refused, engine.memory, engine.budget, facts_.name};
        shortage.inside = std::max<Bytes>(0, refused - needed_);
        shortage.likely = likely_need(*parsed_.signature, needed_, refused, session_.device);
        interrupted(shortage);
        throw OutOfBudgetError(std::move(shortage));
    }
}

// Do the same for a kernel that can run again. refusable: Rekindle's allocator may refuse memory to
// the kernel.
void Operation::call_until_it_fits(bool refusable) {
    // Copies of the arguments, to run the kernel again: a kernel that fails may have moved some of
    // its arguments.
    c10::SmallVector<c10::IValue, 6> arguments;
    const auto given = boxed_arguments();
    arguments.append(given.begin(), given.end());
    // The loop ends: an attempt of the kernel has a memory limit only if the attempt before got
    // past an earlier refusal.
    bool ignores = false;  // a workspace that is too small to be counted
    Bytes before = 0;
    for (bool limited = refusable;;) {
        const Bytes room = ignores ? needed_ + NOTICED - 1 : room_inside(session_);
        const std::uint64_t begun = session_.in_progress.started + 1;
        const Bytes refused = attempt(limited ? room : UNLIMITED, &arguments);
        if (refused == 0) [[likely]] {
            return;
        }
        // Limit the memory of the next attempt only if `refused` counts this operator alone: no
        // other operator started meanwhile.
        limited = session_.in_progress.started == begun && refused > before;
        before = refused;
        ++session_.observers.repeated_calls;
        call_.put_back({arguments.data(), arguments.size()});
        if (limited && !find_room_inside(refused)) {
            ignores = true;
        }
    }
}

// Run `kernel` with the session mutex released. PyTorch's own kernels keep it in two cases. If they
// draw random numbers: if another thread drew between the note of the generator's state (`draw`)
// and the kernel, a recomputation would draw other numbers. And if they write what a recomputation
// in another thread could read.
template <class Kernel>
void Operation::run_unlocked(Kernel&& kernel) {
    if (facts_.is_aten &&
        (!random().empty() || writes_what_is_needed(parsed_, inputs_, session_.in_progress)))
        [[unlikely]] {
        kernel();
        return;
    }
    const Unlocked others(lock_);
    kernel();
}

// Run `work`, a part of a kernel's run, with the session mutex held.
template <class Work>
void Operation::run_locked(Work&& work) {
    if (lock_.is_held()) {
        work();
        return;
    }
    const std::scoped_lock again(lock_);
    work();
}

// Run the kernel once. If it would use more memory than `limit` bytes, stop it and return the bytes
// that it would use; otherwise return 0. arguments: copies of the arguments, to run it again after
// a device OOM; null if it may not run again. They are released once the kernel has run.
Bytes Operation::attempt(Bytes limit, c10::SmallVectorImpl<c10::IValue>* arguments) {
    // The kernel, which runs, needs `wanted` bytes so far. Evict values to make room for them, and
    // return the bytes that it may have.
    const auto clear = [&](Bytes wanted) {
        Bytes room = UNLIMITED;
        run_locked([&] { room = clear_inside(session_, wanted, needed_ + inside_); });
        // A kernel that writes is not stopped, because what it has written could not be restored.
        const bool unnoticed = needed_ <= room && wanted < needed_ + NOTICED;
        return facts_.writes || unnoticed ? std::max(room, wanted) : room;
    };
    // Measures the workspace of the kernel, but only while no other operator runs: their memory
    // would be counted too.
    std::optional<WorkspaceProbe> watched;
    const bool priced = parsed_.signature->priced;
    // The workspace of an operator whose results depend on contents may differ in each call.
    if ((!priced || facts_.dynamic) && session_.in_progress.operators == 0) [[unlikely]] {
        const bool runs_once = arguments == nullptr;
        watched.emplace(
            session_.device, limit, runs_once ? std::optional<MoveLimit>(clear) : std::nullopt
        );
    }
    if (session_.uses_arena) {
        the_arena().note_counted(session_.engine.memory);
    }
    const std::uint64_t begun = ++session_.in_progress.started;
    const KernelOperands operands(std::span(parsed_.tensors.data(), parsed_.tensors.size()));
    try {
        const bool reads_anything = !facts_.is_aten;
        const Running running(session_, needed_ + inside_, reads_anything);
        run_unlocked([&] { redispatch(priced); });
    } catch (std::exception& error) {
        session_.registry.drain();
        // Code of the program may raise another error after it was refused memory.
        const Bytes refused = watched ? watched->refused() : 0;
        if (refused > 0 &&
            (facts_.is_aten || message_of(error).find("bad_alloc") != std::string::npos)) {
            return refused;
        }
        if (arguments == nullptr || !rescued(error, {arguments->data(), arguments->size()})) {
            interrupted(error);
            throw;
        }
        return 0;
    }
    if (arguments != nullptr) [[unlikely]] {
        arguments->clear();
    }
    session_.registry.drain();
    if (watched && session_.in_progress.started == begun) [[unlikely]] {
        if (const std::optional<WorkspaceUsed> used = watched->end()) {
            learn_workspace(*parsed_.signature, *used, session_.device);
        }
    }
    return 0;
}

// Return true if `error` was a device OOM, and the kernel succeeded when repeated after evictions.
bool Operation::rescued(const std::exception& error, std::span<const c10::IValue> arguments) {
    if (arguments.empty() || !is_device_oom(error)) {
        return false;
    }
    session_.room.rescue(needed_, error, [&] {
        call_.put_back(arguments);
        for (const std::unique_ptr<RngCheckpoint>& each : random()) {
            each->restore();
        }
        const bool priced = parsed_.signature->priced;
        run_unlocked([&] { redispatch(priced); });
    });
    session_.registry.drain();
    return true;
}

// Call the next kernel in the dispatcher. Runs with the session mutex released. priced: the cost of
// such calls is known.
void Operation::redispatch(bool priced) {
    if (Effects* const found = effects(); found != nullptr) [[unlikely]] {
        Effects::Watching watching(found);
        run_priced(priced);
        watching.end();
        return;
    }
    const c10::impl::ExcludeDispatchKeyGuard guard(KEY);
    if (facts_.has(Traits::CONJUGATING)) [[unlikely]] {
        // Let PyTorch resolve conjugation, as it does if the program has no dispatch mode.
        const auto keys = c10::impl::tls_local_dispatch_key_set();
        const c10::impl::ForceDispatchKeyGuard conjugating(
            keys.included_,
            keys.excluded_.remove(c10::DispatchKey::Conjugate).remove(c10::DispatchKey::Negative)
        );
        run_priced(priced);
        return;
    }
    run_priced(priced);
}

// Run the kernel. Measure its time, unless the cost of such calls is known (`priced`).
void Operation::run_priced(bool priced) {
    if (priced) [[likely]] {
        run_kernel();
        return;
    }
    if (session_.device.queues()) {
        priced_by_events();
        return;
    }
    const Nanoseconds started = now_ns();
    run_kernel();
    const Nanoseconds elapsed = now_ns() - started;
    run_locked([&] { parsed_.signature->sample(elapsed); });
}

// Run the kernel. If the result is written over the first argument, the result is a new tensor in
// the argument's storage.
void Operation::run_kernel() {
    if (!parsed_.takes_over) [[likely]] {
        call_.run();
        return;
    }
    // NOLINTNEXTLINE(bugprone-unchecked-optional-access): there if it may take over
    call_.run_over_first(facts_.arguments, *facts_.twin, parsed_.signature->geometries[0]);
}

// Run the kernel, and measure its time with events of the device. The session mutex is taken only
// for the bookkeeping.
void Operation::priced_by_events() {
    bool wanted = false;
    run_locked([&] { wanted = session_.prices.wants_more(*parsed_.signature); });
    if (!wanted) {
        run_kernel();
        return;
    }
    const c10::Stream stream = session_.device.current_stream();
    Prices::Pair pair(parsed_.signature, stream);
    run_kernel();
    pair.end.record(stream);
    run_locked([&] { session_.prices.add(std::move(pair)); });
}

// Return true if a recomputation may give different bits, so that the results must not be evicted
// without a trial. Twin of rekindle.pytorch.operators._doubtful, which gives the reasons.
bool Operation::may_differ() const {
    if (facts_.rng_state_args != 0) {
        const auto given = boxed_arguments();
        bool draws = true;
        for (std::uint32_t i = 0; i < facts_.arguments && i < 64; ++i) {
            if ((facts_.rng_state_args >> i & 1) != 0) {
                const c10::IValue& value = given[i];
                draws = draws &&
                        (value.isTensor() ? value.toTensor().defined()
                                          : !value.isNone() && value.toScalar().toDouble() > 0);
            }
        }
        return draws;
    }
    if (facts_.has(Traits::TRIED)) {
        return session_.device.doubts;
    }
    const auto on_cpu = [](const c10::TensorImpl* tensor) { return tensor->is_cpu(); };
    if (!facts_.has(Traits::DOUBT) || !session_.device.doubts ||
        std::ranges::all_of(parsed_.tensors, on_cpu)) {
        return false;
    }
    if (facts_.has(Traits::TIMED)) {
        return kernels_are_timed();
    }
    if (at::globalContext().deterministicAlgorithms()) {
        return false;
    }
    if (facts_.has(Traits::ACCUMULATES)) {
        const auto given = boxed_arguments();
        const auto position = static_cast<std::size_t>(facts_.traits.accumulate);
        return position < given.size() && given[position].isBool() && given[position].toBool();
    }
    return true;
}

// Clean up after the operator has failed with `error`: register the writes that it may have made
// before, and allow eviction of its inputs again. The program gets `error`.
void Operation::interrupted(std::exception& error) {
    after(error, [&] {
        if (!inputs_.empty() && !parsed_.written.empty()) {
            written_over(false, 0);
        }
    });
    after(error, [&] { let_go_of_sources(); });
}

}  // namespace rekindle
