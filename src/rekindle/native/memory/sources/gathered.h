// Parameters that FSDP frees after a forward pass, and gathers again for the backward pass. Recipes
// read them as sources.
//
// NOTE [Gathered parameters]
//
// A unit is a module on which the program called `fully_shard`. FSDP gathers the parameters of a
// unit before the unit's forward pass, frees them afterwards (`UntypedStorage.resize_(0)`), and
// gathers them into the same storages before the unit's backward pass. In between, nothing can be
// recomputed from them.
//
// Only the unit's backward pass reads the values that autograd saved in the unit, and by then its
// parameters are gathered again. These values keep their recipes, and may be evicted. Values that
// the program itself holds, such as the result of the unit, may be read while the parameter is
// freed. So when FSDP frees a parameter, the values that depend on it and that the program holds
// lose their recipes and stay in memory (`leave`). Recipes of values computed later from these
// values do not read the parameter.
//
// A unit may make more tensors than its result, such as a loss of its own. In a backward pass,
// autograd runs nodes that were created later first. FSDP gathers the parameters in a hook of the
// result. Nodes created before those of the result run after this hook. If the unit created nodes
// after those of the result, they may run before the hook. Then all values that depend on the
// parameter stay in memory.
//
// The parameter may have changed when it comes back: an optimizer's step, a checkpoint, another
// rank. So its contents are compared, at the first recomputation that reads it (`is_back`). If they
// differ, the recomputation raises. If a recipe is recorded that reads the new contents, the
// parameter becomes a new source (`Sources::settle`), and evicted values that need the old contents
// can never be recomputed.
//
// A recomputation never gathers parameters: the ranks evict different values, so they would run
// collectives in different orders.
#pragma once

#include <cstdint>

#include "../../engine/engine.h"
#include "../records/storage_record.h"
#include "../room/frees.h"
#include "../room/room.h"

namespace rekindle {

// The parameters that FSDP has freed within one budget. The caller holds the session mutex.
class GatheredParameters final {
public:
    GatheredParameters(Frees& frees, Room& room)
        : engine_(frees.engine), frees_(frees), room_(room) {}

    // Prepare for FSDP to free the gathered parameter `record`, which recipes read. `newest` is the
    // sequence number of the newest autograd node that made the result of the parameter's unit.
    // Return false if the contents of `record` must be forgotten (`Sources::forget`).
    bool leave(StorageRecord& record, std::int64_t newest);
    // Before a write to `source`, a value without a recipe: check whether values that need its
    // contents can be recomputed only after FSDP gathers a parameter. If so, keep the values
    // computed directly from `source` in memory, so that no recipe needs the old contents of
    // `source`.
    void detach_from(StorageRecord& source);

private:
    void drop_recipe_with_siblings(StorageRecord& record);

    Engine& engine_;
    Frees& frees_;
    Room& room_;
    bool any_ = false;  // the program has freed parameters that it may fill again, as FSDP does
};

}  // namespace rekindle
