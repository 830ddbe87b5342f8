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
#include "operation.h"
#include "views.h"

namespace rekindle {

namespace {

void pass(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard guard(KEY);
    op.redispatchBoxed(keys & BELOW_KEY, stack);
}

// What `set_` looks at is there, where it was and where it goes.
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

// Runs `set_`: a tensor moves to other memory, which maybe no operator made.
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
            record->version.expected = -1;  // its counter moves, but what is there does not
        }
    }
    {
        const Unlocked others(lock);
        pass(op, keys, stack);
    }
    driver.settle();
    if (plain) {
        if (Record* record = driver.known(*target.unsafeGetTensorImpl())) {
            record->version.expected = -1;  // autograd counts this write afterwards
        }
    }
    if (touched) {
        touched->end();
    }
}

// Somebody may read what a result is of that may have no memory of its own: that counts.
void meet_first(Driver& driver, const Facts& facts, const torch::jit::Stack& stack, Locked& lock) {
    const auto given = torch::jit::last(stack, facts.arguments);
    if (!given.empty() && given[0].isTensor()) {
        meet_whole(driver, lock, *given[0].toTensor().unsafeGetTensorImpl());
    }
}

// Runs what makes no memory and does no work.
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
        if (facts.returns == 0 && has_memory(tensor) &&
            is_husk(*tensor.unsafe_storage().unsafeGetStorageImpl())) {
            torch::jit::drop(*stack, facts.arguments);  // `record_stream`, of no memory
            return;
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

// Runs what reads no element. What it returns counts, as a rule with the tensor that has it; nobody
// makes room for that.
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

// A graph has the addresses of what it reads and writes: that stays where it is.
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

// Returns whether Python may be told of what is due: not where nothing may be thrown.
bool run(
    Driver& driver,
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack
) {
    Locked lock(std::adopt_lock);
    const Facts& facts = facts_of(op);
    const std::optional<c10::Stream> now = driver.device.stream_if_any();
    if (driver.device.is_capturing(now)) {  // it neither counts nor is recorded
        if (driver.lends || driver.any_time) {
            keep_operands_of_graph(driver, facts, *stack);
        }
        lock.unlock();
        pass(op, keys, stack);
        return false;
    }
    if (facts.has(Traits::QUERY)) {  // PyTorch asks where an error would end the process
        query(driver, facts, op, keys, stack, lock);
        return false;
    }
    if (facts.unseen) {
        throw Unseen(facts);
    }
    if (!PYTHON_COMES_FIRST && keys.has(c10::DispatchKey::Python)) {
        throw Unseen(facts, true);
    }
    if (facts.composed) {  // its parts come here, if it has any; so it is in inference mode
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
    if (PYTHON_COMES_FIRST && *why_not == '\0') {  // else who asks for one is told that it does not
        see_views(library_at_key("aten"));
    }
    see_removals();
    return why_not;
}

}  // namespace rekindle
