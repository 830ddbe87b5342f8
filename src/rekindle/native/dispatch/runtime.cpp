// The fallback that the dispatcher calls for every operator inside a budget.
//
// NOTE [One operator's way through the core]
//
// 1. The dispatcher calls `fallback` below autograd, in threads that include our dispatch key, or
//    the operator's own kernel there (see NOTE [Boxed and typed calls] in ops/operator_call.h).
//    Calls with fake tensors go to PyTorch's own kernel, if it has one (`run_for_fakes`).
//    `on_operator` takes the session mutex and finds the active session (`lock_and_see`). Outside
//    any budget the operator is passed on.
// 2. `run` looks up the facts of the operator (ops/facts.h). Views, queries and `set_` are handled
//    in this file. While memory is far below the budget, most operators are only counted
//    (dispatch/counted_call.cpp). Every other operator becomes an `Operation`
//    (dispatch/operation.cpp).
// 3. The call is parsed and gets its signature (ops/parsed_call.cpp, ops/signature.h): the
//    operator, its plain arguments and the geometry (sizes, strides, offset, dtype) of its tensors.
//    Costs, sizes and workspaces are known per signature.
// 4. Inputs are registered, and evicted ones are recomputed (dispatch/operation_inputs.cpp,
//    memory/recomputer/recomputing.cpp). Before the operator overwrites a source, evicted values
//    that need its old contents are recomputed and pinned (R4, sources).
// 5. Room is made for the results and the workspace: `Room` (memory/room/room.cpp) asks the engine
//    (engine/), which evicts, or throws `OutOfBudgetError`.
// 6. The session mutex is released around the kernel (dispatch/operation_execute.cpp), because a
//    kernel may run the user's code.
// 7. The results become records with a recipe (memory/sources/storages.cpp), unless only their
// bytes count.
// 8. After the session mutex is released, pending notifications are delivered to Python (`notify`).
//
// Errors of the core are turned into Python exceptions in one place, `translate_errors`.
//
// Branches that few operators take are marked `[[unlikely]]` on this way, so that the compiler puts
// the code of the others in a row. Each operator runs through some 3,000 instructions here once, so
// jumps to code that the processor has not at hand take more time than the instructions.
#include "runtime.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <optional>

#include "../memory/evict_held_last.h"
#include "../memory/held/held_eviction.h"
#include "../memory/notify.h"
#include "../memory/session.h"
#include "../torch/arguments.h"
#include "../torch/dispatch_key.h"
#include "../torch/geometry.h"
#include "../torch/parts.h"
#include "../torch/private_generators.h"
#include "collectives.h"
#include "counted_call.h"
#include "effects.h"
#include "in_place.h"
#include "operation.h"
#include "several_calls.h"
#include "typed_kernels.h"
#include "views.h"

namespace rekindle {

namespace {

// Pass the operator on to the next kernel in PyTorch's dispatcher.
void pass(OperatorCall& call) {
    const c10::impl::ExcludeDispatchKeyGuard guard(KEY);
    call.run();
}

// Restore the tensor arguments of the operator `set_`, and do not evict them while `set_` runs.
void bring_operands(
    Session& session,
    const Facts& facts,
    const torch::jit::Stack& stack,
    Locked& lock,
    std::optional<PinnedOperands>& touched,
    std::optional<Reading>& reading
) {
    StorageList storages;
    for (const c10::IValue& value : last_values(stack, facts.arguments)) {
        if (value.isTensor() && has_memory(*value.toTensor().unsafeGetTensorImpl())) {
            storages.push_back(
                value.toTensor().unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
            );
        }
    }
    if (session.held.eviction) {
        touched.emplace(session.frees, *session.held.eviction, session.in_progress, storages, lock);
        return;
    }
    reading.emplace(session.held, storages);
    for (const c10::StorageImpl* storage_impl : storages) {
        retry_evicting_held(session, lock, [&] { session.room.bring_back(*storage_impl); });
    }
}

// Run the operator `set_`, which gives a tensor another storage, maybe one that no operator made.
void set_memory(Session& session, const Facts& facts, OperatorCall& call, Locked& lock) {
    session.frees.process_pending();
    std::optional<PinnedOperands> touched;
    std::optional<Reading> reading;
    bring_operands(session, facts, call.stack(), lock, touched, reading);
    const at::Tensor target = last_values(call.stack(), facts.arguments)[0].toTensor();
    const bool plain = has_memory(*target.unsafeGetTensorImpl());
    if (plain) {
        if (StorageRecord* record =
                find_or_register(session, lock, *target.unsafeGetTensorImpl())) {
            // `set_` bumps the version counter, but does not change the contents.
            record->version.expected = -1;
        }
    }
    {
        const Unlocked others(lock);
        pass(call);
    }
    session.frees.process_pending();
    if (plain) {
        if (StorageRecord* record =
                find_or_register(session, lock, *target.unsafeGetTensorImpl())) {
            // Autograd bumps the version counter for this write afterwards. The runtime has
            // registered the write already, so the bump must not count as another one.
            record->version.expected = -1;
        }
    }
    if (touched) {
        touched->end();
    }
}

// Register the first argument of a view operator, so that its memory is counted: the program may
// read it through the view. An argument without memory is ignored.
void register_first_argument(
    Session& session, const Facts& facts, const torch::jit::Stack& stack, Locked& lock
) {
    const auto given = last_values(stack, facts.arguments);
    if (!given.empty() && given[0].isTensor()) {
        register_base(session, lock, *given[0].toTensor().unsafeGetTensorImpl());
    }
}

// Run an operator that returns a view. Such an operator allocates no memory and launches no kernel.
void view(Session& session, const Facts& facts, OperatorCall& call, Locked& lock) {
    torch::jit::Stack& stack = call.stack();
    const auto given = last_values(stack, facts.arguments);
    if (!given.empty() && given[0].isTensor()) {
        const c10::TensorImpl& tensor = *given[0].toTensor().unsafeGetTensorImpl();
        if (facts.returns == 0 && has_memory(tensor)) {  // `record_stream`, which returns nothing
            session.records_streams = true;
            if (is_placeholder(*tensor.unsafe_storage().unsafeGetStorageImpl())) {
                // `record_stream` on an evicted tensor has nothing to do, because the tensor has no
                // memory.
                torch::jit::drop(stack, facts.arguments);
                return;
            }
        }
    }
    register_first_argument(session, facts, stack, lock);
    const bool tells = facts.marks && session.observers.due.tell_ranges;
    lock.unlock();
    if (tells) {
        notify_range(session.observers, facts.ends);
    }
    pass(call);
}

// Run an operator that reads no element of its arguments. Its results are counted, but nothing is
// evicted to make room for them.
void query(Session& session, const Facts& facts, OperatorCall& call, Locked& lock) {
    {
        const Unlocked others(lock);
        pass(call);
    }
    session.registry.drain();
    session.storages.count(0, count_results(session, facts, call.results(facts.returns)), 0);
}

// Pin the operands of an operator that is captured into a CUDA graph, because the graph stores the
// addresses of their memory.
void keep_operands_of_graph(Session& session, const Facts& facts, const torch::jit::Stack& stack) {
    session.registry.drain();
    each_memory(
        last_values(stack, facts.arguments), [&](std::uint32_t, const at::Tensor& tensor, bool) {
            StorageRecord* record = session.registry.find_record(*tensor.unsafeGetTensorImpl());
            if (record == nullptr) {
                return;
            }
            if (record->placeholder) {
                throw RecomputeDuringCaptureError(record->site());
            }
            session.held.pin_while_held(*record);
        }
    );
}

// Run one operator of the program. Return false if notifications to Python must wait, because an
// exception that Python raises here would end the process.
bool run(Session& session, OperatorCall& call) {
    Locked lock(std::adopt_lock);
    const Facts& facts = call.facts();
    const bool grad_mode = c10::GradMode::is_enabled();
    if (facts.in_place == nullptr || grad_mode) {
        forget_unpacked();
    }
    if (session.in_progress.observed != 0) [[unlikely]] {
        if (Effects* effects = Effects::current()) {
            effects->run(facts, call, lock);
            return false;
        }
    }
    const std::optional<c10::Stream> now = session.device.stream_if_any();
    // During CUDA graph capture, operators are neither counted nor recorded.
    if (session.device.is_capturing(now)) [[unlikely]] {
        if (session.held.evicts_last || session.held.eviction) {
            keep_operands_of_graph(session, facts, call.stack());
        }
        lock.unlock();
        pass(call);
        return false;
    }
    // PyTorch calls query operators in places where an exception would end the process.
    if (facts.has(Traits::QUERY)) [[unlikely]] {
        query(session, facts, call, lock);
        return false;
    }
    if (facts.unseen) [[unlikely]] {
        throw UnsupportedOperatorError(facts);
    }
    if (!PYTHON_COMES_FIRST && call.keys.has(c10::DispatchKey::Python)) {
        throw UnsupportedOperatorError(facts, true);
    }
    // A composite operator reaches this function in inference mode only. The operators that it
    // consists of reach it separately.
    if (facts.composed) [[unlikely]] {
        register_first_argument(session, facts, call.stack(), lock);
        lock.unlock();
        call.run();
    } else if (facts.view) [[unlikely]] {
        view(session, facts, call, lock);
    } else if (facts.moves) [[unlikely]] {
        set_memory(session, facts, call, lock);
    } else if (facts.on_lists && run_list_in_parts(session, facts, call, lock, on_operator)) {
        return true;
    } else if (!session.events.only_counting.on() || !run_counted(session, facts, call, lock)) {
        Operation(session, facts, call, lock, grad_mode).run(now);
    }
    return true;
}

// Run PyTorch's kernel for fake tensors if the call concerns them. Return false if not.
bool run_for_fakes(OperatorCall& call) {
    take_over_new_operators();
    if (!is_in_fake_mode() && !call.has_fakes()) {
        return false;
    }
    call_kernel_behind(call.op, call.keys, call.stack());
    return true;
}

// The kernel of all operators without a kernel of their own at Rekindle's dispatch key.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    BoxedCall call(op, keys, stack);
    on_operator(call);
}

}  // namespace

void on_operator(OperatorCall& call) {
    if (shares_key && run_for_fakes(call)) [[unlikely]] {
        return;
    }
    const c10::intrusive_ptr<Session> session = lock_and_see(call.keys);
    if (!session) [[unlikely]] {
        if (PrivateGenerators* drawing = PrivateGenerators::current()) {
            drawing->intercept(call.op, call.stack(), [&] { call.run(); });
        } else {
            pass(call);
        }
        return;
    }
    const bool told = translate_errors(*session, [&] { return run(*session, call); });
    if (told) [[likely]] {
        notify(*session);
    }
}

void register_fallback() {
    look_behind();
    register_typed_kernels();
    // The kernels of view operators bypass `run`. Without `PYTHON_COMES_FIRST` views must pass
    // through `run`, because `run` refuses operators that have a Python dispatch key.
    if (PYTHON_COMES_FIRST) {
        register_view_kernels();
    }
    register_at_key([] { return torch::CppFunction::makeFromBoxedFunction<&fallback>(); });
    refuse_collectives_in_replays();
    watch_removed_operators();
}

}  // namespace rekindle
