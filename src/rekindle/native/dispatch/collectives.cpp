#include "collectives.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "../memory/notify.h"
#include "../ops/facts.h"
#include "../torch/dispatch_key.h"

namespace rekindle {

namespace {

void refuse(
    const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* /*stack*/
) {
    refuse_collective(op.schema().name().c_str());
}

}  // namespace

void refuse_collectives_in_replays() {
    if (!open_replay_key()) {
        return;
    }
    for (const c10::OperatorName& each : c10::Dispatcher::singleton().getAllOpNames()) {
        if (!has_effects(each.name)) {
            continue;
        }
        register_kernel(each, torch::CppFunction::makeFromBoxedFunction<&refuse>(), REPLAY_KEY);
    }
}

}  // namespace rekindle
