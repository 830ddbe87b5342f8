// Operators with `evict="anything"`: operands are restored and locked while the operator runs, and
// its results become evictable.
#include "../memory/any_time.h"
#include "../torch/parts.h"
#include "operation.h"

namespace rekindle {

// Run the operator with its operands locked in the engine, then make its results evictable.
void Operation::run_touching() {
    Homes homes;
    note_read(homes);
    {
        Touched touched(driver_, homes, lock_);
        if (may_let_go()) {
            about_to_let_go(driver_, lock_);
        }
        run_with_inputs();
        touched.end();
    }
    driver_.any_time->look_at_sources(lock_);
    let_results_return();
}

// Return true if something may have to be evicted for the operator, as far as is known. Then Python
// is asked first which threads may read user-held values.
bool Operation::may_let_go() {
    const Signature& signature = *invocation_.signature;
    if (signature.needed < 0 || !signature.priced || facts_.dynamic || driver_.steps) {
        return true;
    }
    Bytes more = signature.needed + signature.workspace;
    for (std::uint32_t i = 0; i < invocation_.tensors.size(); ++i) {
        const c10::StorageImpl& home =
            *invocation_.tensors[i]->unsafe_storage().unsafeGetStorageImpl();
        const Driver::Resident* found = driver_.resident_at(home);
        if (found == nullptr) {
            more += static_cast<Bytes>(home.nbytes());
            continue;
        }
        const Record* record = found->record;
        if (record != nullptr && (record->foreign || (is_written(i) && record->consumed()))) {
            // A copy is made, or values that need it are recomputed.
            return true;
        }
    }
    const Engine& engine = driver_.engine;
    return more > engine.budget - engine.memory - engine.in_flight;
}

// Make results and written operands evictable while the program holds them.
void Operation::let_results_return() {
    AnyTime& any_time = *driver_.any_time;
    each_memory(
        torch::jit::last(stack_, facts_.returns),
        [&](std::uint32_t, const at::Tensor& tensor, bool) {
            const auto* found = driver_.resident_at(*tensor.storage().unsafeGetStorageImpl());
            if (found != nullptr && found->record != nullptr) {
                any_time.made(*found->record);
            }
        }
    );
    for (const std::uint32_t position : invocation_.written) {
        if (position < inputs_.size() && inputs_[position]) {
            any_time.made(current(*input(position)));
        }
    }
}

}  // namespace rekindle
