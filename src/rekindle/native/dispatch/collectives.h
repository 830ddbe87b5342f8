// Refuses collectives that the body of a recomputed operator calls (R11, refuse loudly).
#pragma once

namespace rekindle {

// Register kernels of all collectives that raise while an operator is recomputed. Called once,
// after the namespaces with effects are known.
void refuse_collectives_in_replays();

}  // namespace rekindle
