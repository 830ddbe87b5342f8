// The fallback that the dispatcher calls for every operator inside a budget.
//
// NOTE [One operator's way through the core]
//
// 1. The dispatcher calls `fallback` below autograd, in threads that include our dispatch key. It
//    takes the session mutex and finds the active driver (`lock_and_see`). Outside any budget the
//    operator is passed on.
// 2. `run` looks up the facts of the operator (ops/facts.h). Views, queries and `set_` are handled
//    in this file. Every other operator becomes an `Operation` (dispatch/operation.cpp).
// 3. The call is parsed and gets its signature (ops/invocation.cpp, ops/signature.h): the operator,
//    its plain arguments and the geometry of its tensors. Costs, sizes and workspaces are known per
//    signature.
// 4. Inputs are registered, and evicted ones are recomputed (dispatch/operands.cpp,
//    memory/recomputing.cpp). Sources that the operator overwrites are saved first (R4).
// 5. Room is made for the results and the workspace: the driver (memory/driver.cpp) asks the engine
//    (engine/), which evicts, or throws `Shortage`.
// 6. The lock is released around the kernel (dispatch/calling.cpp), because a kernel may run the
//    user's code.
// 7. The results become records with a recipe (memory/storages.cpp), unless only their bytes count.
// 8. After the lock is released, pending notifications go to Python (`tell`).
//
// Errors of the core are turned into Python exceptions in one place, `in_words`.
#include "runtime.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <optional>

#include "../memory/any_time.h"
#include "../memory/driver.h"
#include "../memory/held.h"
#include "../memory/program.h"
#include "../torch/dispatch_key.h"
#include "../torch/geometry.h"
#include "../torch/parts.h"
#include "effects.h"
#include "in_place.h"
#include "operation.h"
#include "views.h"

namespace rekindle {

namespace {

// Pass the operator on to the next kernel.
void pass(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard guard(KEY);
    op.redispatchBoxed(keys & BELOW_KEY, stack);
}

// Restore the operands of `set_`, and keep them while it runs.
void bring_operands(
    Driver& driver,
    const Facts& facts,
    const torch::jit::Stack& stack,
    Locked& lock,
    std::optional<Touched>& touched,
    std::optional<Reading>& reading
) {
    Homes homes;
    for (const c10::IValue& value : torch::jit::last(stack, facts.arguments)) {
        if (value.isTensor() && has_memory(*value.toTensor().unsafeGetTensorImpl())) {
            homes.push_back(
                value.toTensor().unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()
            );
        }
    }
    if (driver.any_time) {
        touched.emplace(driver, homes, lock);
        return;
    }
    reading.emplace(driver, homes);
    for (const c10::StorageImpl* home : homes) {
        or_lending(driver, lock, [&] { driver.bring_back(*home); });
    }
}

// Run `set_`, which binds a tensor to another storage, maybe one that no operator made.
void set_memory(
    Driver& driver,
    const Facts& facts,
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack,
    Locked& lock
) {
    driver.settle();
    std::optional<Touched> touched;
    std::optional<Reading> reading;
    bring_operands(driver, facts, *stack, lock, touched, reading);
    const at::Tensor target = torch::jit::last(*stack, facts.arguments)[0].toTensor();
    const bool plain = has_memory(*target.unsafeGetTensorImpl());
    if (plain) {
        if (Record* record = driver.known(*target.unsafeGetTensorImpl())) {
            // Its version counter moves, but the contents do not change.
            record->version.expected = -1;
        }
    }
    {
        const Unlocked others(lock);
        pass(op, keys, stack);
    }
    driver.settle();
    if (plain) {
        if (Record* record = driver.known(*target.unsafeGetTensorImpl())) {
            // Autograd bumps the version counter for this write afterwards.
            record->version.expected = -1;
        }
    }
    if (touched) {
        touched->end();
    }
}

// Register the first argument of a view. Its memory counts from now on, because the view may be
// read and may not have memory of its own.
void meet_first(Driver& driver, const Facts& facts, const torch::jit::Stack& stack, Locked& lock) {
    const auto given = torch::jit::last(stack, facts.arguments);
    if (!given.empty() && given[0].isTensor()) {
        meet_whole(driver, lock, *given[0].toTensor().unsafeGetTensorImpl());
    }
}

// Run an operator that makes no memory and does no work.
void view(
    Driver& driver,
    const Facts& facts,
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack,
    Locked& lock
) {
    const auto given = torch::jit::last(*stack, facts.arguments);
    if (!given.empty() && given[0].isTensor()) {
        const c10::TensorImpl& tensor = *given[0].toTensor().unsafeGetTensorImpl();
        if (facts.returns == 0 && has_memory(tensor)) {  // `record_stream`
            driver.records_streams = true;
            if (is_husk(*tensor.unsafe_storage().unsafeGetStorageImpl())) {
                // It has no effect on an evicted tensor.
                torch::jit::drop(*stack, facts.arguments);
                return;
            }
        }
    }
    meet_first(driver, facts, *stack, lock);
    const bool tells = facts.marks && driver.tell_ranges;
    lock.unlock();
    if (tells) {
        tell_range(driver, facts.ends);
    }
    pass(op, keys, stack);
}

// Run an operator that reads no element. Results without a tensor that owns them are counted; no
// room is made for them.
void query(
    Driver& driver,
    const Facts& facts,
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack,
    Locked& lock
) {
    {
        const Unlocked others(lock);
        pass(op, keys, stack);
    }
    driver.collect();
    Bytes made = 0;
    each_memory(
        torch::jit::last(*stack, facts.returns),
        [&](std::uint32_t, const at::Tensor& tensor, bool) {
            made += driver.count(*tensor.storage().unsafeGetStorageImpl(), &facts);
        }
    );
    driver.count(0, made, 0);
}

// Keep the operands of an operator that is captured into a CUDA graph: the graph stores their
// addresses.
void keep_operands_of_graph(Driver& driver, const Facts& facts, const torch::jit::Stack& stack) {
    driver.collect();
    each_memory(
        torch::jit::last(stack, facts.arguments),
        [&](std::uint32_t, const at::Tensor& tensor, bool) {
            const auto* found = driver.resident_at(*tensor.storage().unsafeGetStorageImpl());
            if (found == nullptr || found->record == nullptr) {
                return;
            }
            if (found->record->husk) {
                throw InAGraph(found->record->site());
            }
            driver.stays(*found->record);
        }
    );
}

// Run the operator. Return false if notifications to Python must wait, because nothing may be
// thrown here.
bool run(
    Driver& driver,
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack
) {
    Locked lock(std::adopt_lock);
    const Facts& facts = facts_of(op);
    if (facts.in_place == nullptr) {
        forget_unpacked();
    }
    if (driver.watched != 0) {
        if (Effects* effects = Effects::current()) {
            effects->run(facts, op, keys, *stack, lock);
            return false;
        }
    }
    const std::optional<c10::Stream> now = driver.device.stream_if_any();
    // During CUDA graph capture operators are neither counted nor recorded.
    if (driver.device.is_capturing(now)) {
        if (driver.lends || driver.any_time) {
            keep_operands_of_graph(driver, facts, *stack);
        }
        lock.unlock();
        pass(op, keys, stack);
        return false;
    }
    // PyTorch calls these operators where an exception would end the process.
    if (facts.has(Traits::QUERY)) {
        query(driver, facts, op, keys, stack, lock);
        return false;
    }
    if (facts.unseen) {
        throw Unseen(facts);
    }
    if (!PYTHON_COMES_FIRST && keys.has(c10::DispatchKey::Python)) {
        throw Unseen(facts, true);
    }
    // A composite operator, which arrives here in inference mode only. Its parts arrive separately.
    if (facts.composed) {
        meet_first(driver, facts, *stack, lock);
        lock.unlock();
        op.redispatchBoxed(keys & BELOW_KEY, stack);
    } else if (facts.view) {
        view(driver, facts, op, keys, stack, lock);
    } else if (facts.moves) {
        set_memory(driver, facts, op, keys, stack, lock);
    } else {
        Operation(driver, facts, op, keys, *stack, lock).run(now);
    }
    return true;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const c10::intrusive_ptr<Driver> driver = lock_and_see(keys);
    if (!driver) {
        pass(op, keys, stack);
        return;
    }
    const bool told = in_words(*driver, [&] { return run(*driver, op, keys, stack); });
    if (told) {
        tell(*driver);
    }
}

}  // namespace

const char* see_operators() {
    const char* why_not = register_at_key(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    // Without `PYTHON_COMES_FIRST` a Python key is refused with an error by `run`.
    if (PYTHON_COMES_FIRST && *why_not == '\0') {
        see_views(library_at_key("aten"));
    }
    see_removals();
    return why_not;
}

}  // namespace rekindle
