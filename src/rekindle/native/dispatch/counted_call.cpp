#include "counted_call.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <new>
#include <optional>
#include <utility>

#include "../allocator/arena.h"
#include "../allocator/counting_allocator.h"
#include "../base/clock.h"
#include "../memory/evict_held_last.h"
#include "../torch/arguments.h"
#include "../torch/dispatch_key.h"
#include "../torch/geometry.h"
#include "../torch/parts.h"
#include "running.h"

namespace rekindle {

bool count_argument(Session& session, Locked& lock, const c10::TensorImpl& tensor, bool written) {
    const AddressEntry* found = session.registry.find(tensor);
    StorageRecord* record =
        found == nullptr ? find_or_register(session, lock, tensor) : found->record;
    if (record == nullptr) [[likely]] {
        return true;
    }
    if (record->flags != 0 ||
        (written && (record->replayable || session.in_progress.may_read(*record)))) {
        return false;
    }
    if (written && record->special.is_external() && session.sources.overlaps(*record))
        [[unlikely]] {
        return false;
    }
    if (written) {
        record->version.expected = -1;
    }
    return true;
}

Bytes count_results(Session& session, const Facts& facts, std::span<const c10::IValue> results) {
    Bytes made = 0;
    each_memory(results, [&](std::uint32_t, const at::Tensor& tensor, bool) {
        made += session.registry.count(*tensor.storage().unsafeGetStorageImpl(), &facts);
    });
    return made;
}

namespace {

// Count the memory of all arguments of the call. Return false if the operator needs a record of one
// of them, or if one has no memory of its own.
bool count_arguments(Session& session, Locked& lock, const Facts& facts, OperatorCall& call) {
    bool all = true;
    bool first = facts.writes;
    const auto count = [&](const at::Tensor& tensor) {
        const bool written = std::exchange(first, false);
        if (tensor.defined()) {
            const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
            all = all && has_memory(impl) && count_argument(session, lock, impl, written);
        }
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

}  // namespace

bool run_counted(Session& session, const Facts& facts, OperatorCall& call, Locked& lock) {
    session.frees.process_pending_if_needed();
    if (!facts.simple || !count_arguments(session, lock, facts, call)) {
        return false;
    }
    if (session.uses_arena) {
        the_arena().note_counted(session.engine.memory);
    }
    ++session.in_progress.started;
    // Measuring each call would take longer than many calls do.
    const bool measured = session.events.only_counting.samples();
    Nanoseconds cost = 0;
    {
        const Running running(session, 0, true);
        // An operator that has written something cannot run again.
        const Bytes most =
            facts.writes ? UNLIMITED
                         : std::max<Bytes>(
                               0, OnlyCounting::most(session.engine.budget) - session.engine.memory
                           );
        const Unlocked others(lock);
        const c10::impl::ExcludeDispatchKeyGuard guard(KEY);
        const AllocationLimit limit(most);
        // A boxed call consumes its arguments.
        c10::SmallVector<c10::IValue, 6> arguments;
        if (call.is_boxed() && !facts.writes) {
            const auto given = last_values(call.stack(), facts.arguments);
            arguments.append(given.begin(), given.end());
        }
        const Nanoseconds began = measured ? now_ns() : 0;
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
            session.events.only_counting.end();
            return false;
        }
        cost = measured ? (now_ns() - began) * OnlyCounting::SAMPLED : 0;
    }
    session.registry.drain();
    const Bytes made =
        facts.writes ? 0 : count_results(session, facts, call.results(facts.returns));
    session.storages.count(cost, made, 0);
    return true;
}

}  // namespace rekindle
