// An operator within a budget that lets go of anything (`evict="anything"`): what it reads is there
// and stays until it has run, and what it made may be let go from then on.
#include "../memory/any_time.h"
#include "../torch/parts.h"
#include "operation.h"

namespace rekindle {

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

// Whether something has to make way before it runs, as far as that is known: then it is asked first
// who may be reading what.
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
            return true;  // a copy is made, or what needs it is brought back
        }
    }
    const Engine& engine = driver_.engine;
    return more > engine.budget - engine.memory - engine.in_flight;
}

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
