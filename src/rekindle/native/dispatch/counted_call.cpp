#include "counted_call.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <chrono>
#include <new>
#include <optional>
#include <utility>

#include "../allocator/arena.h"
#include "../allocator/counting_allocator.h"
#include "../memory/evict_held_last.h"
#include "../torch/arguments.h"
#include "../torch/dispatch_key.h"
#include "../torch/geometry.h"
#include "../torch/parts.h"
#include "running.h"

namespace rekindle {

namespace {

// Count the memory of `tensor`, an argument, unless it is counted already. Return false if the
// operator needs a record of it. written: the operator writes the argument.
bool count_argument(Driver& driver, Locked& lock, const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) {
        return true;
    }
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    if (!has_memory(impl)) {
        return false;
    }
    const AddressEntry* found =
        driver.find_by_address(*impl.unsafe_storage().unsafeGetStorageImpl());
    StorageRecord* record = found == nullptr ? find_or_register(driver, lock, impl) : found->record;
    if (record == nullptr) {
        return true;
    }
    if (record->flags != 0 || (written && (record->replayable || record->consumed()))) {
        return false;
    }
    if (written) {
        record->version.expected = -1;
    }
    return true;
}

// Do this for all arguments of the call.
bool count_arguments(Driver& driver, Locked& lock, const Facts& facts, OperatorCall& call) {
    bool all = true;
    bool first = facts.writes;
    const auto count = [&](const at::Tensor& tensor) {
        all = all && count_argument(driver, lock, tensor, std::exchange(first, false));
    };
    if (call.is_boxed()) {
        each_tensor(
            last_values(call.stack(), facts.arguments),
            [&](std::uint32_t, const at::Tensor& tensor) { count(tensor); }
        );
        return all;
    }
    for (const Operand& argument : call.operands(facts.arguments)) {
        if (argument.tensor != nullptr) {
            count(*argument.tensor);
        }
    }
    return all;
}

Nanoseconds elapsed_since(std::chrono::steady_clock::time_point began) {
    const auto took = std::chrono::steady_clock::now() - began;
    return std::chrono::duration_cast<std::chrono::nanoseconds>(took).count();
}

}  // namespace

bool run_counted(Driver& driver, const Facts& facts, OperatorCall& call, Locked& lock) {
    driver.process_pending_if_needed();
    if (!facts.simple || !count_arguments(driver, lock, facts, call)) {
        return false;
    }
    if (driver.uses_arena) {
        the_arena().note_counted(driver.engine.memory);
    }
    ++driver.in_progress.started;
    // Measuring each call would take longer than many calls do.
    const bool measured = driver.only_counting.samples();
    Nanoseconds cost = 0;
    {
        const Running running(driver, 0, true);
        // An operator that has written something cannot run again.
        const Bytes most = facts.writes ? UNLIMITED : OnlyCounting::most(driver.engine.budget);
        const Unlocked others(lock);
        const c10::impl::ExcludeDispatchKeyGuard guard(KEY);
        const AllocationLimit limit(most);
        // A boxed call consumes its arguments.
        c10::SmallVector<c10::IValue, 6> arguments;
        if (call.is_boxed() && !facts.writes) {
            const auto given = last_values(call.stack(), facts.arguments);
            arguments.append(given.begin(), given.end());
        }
        const auto began =
            measured ? std::chrono::steady_clock::now() : std::chrono::steady_clock::time_point();
        try {
            call.run();
        } catch (const std::exception&) {
            if (!limit.has_refused()) {
                throw;
            }
            if (call.is_boxed()) {
                call.put_back({arguments.data(), arguments.size()});
            }
            const std::scoped_lock again(lock);
            driver.only_counting.end();
            return false;
        }
        cost = measured ? elapsed_since(began) * OnlyCounting::SAMPLED : 0;
    }
    driver.drain_free_queue();
    Bytes made = 0;
    if (!facts.writes) {
        each_memory(
            call.results(facts.returns), [&](std::uint32_t, const at::Tensor& tensor, bool) {
                made += driver.count(*tensor.storage().unsafeGetStorageImpl(), &facts);
            }
        );
    }
    driver.count(cost, made, 0);
    return true;
}

}  // namespace rekindle
