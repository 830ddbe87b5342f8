// Performs the engine's actions on PyTorch's storages: evicts and recomputes values, and swaps them
// out and in.
#pragma once

#include <c10/util/SmallVector.h>

#include "../../engine/engine.h"
#include "../../engine/performer.h"
#include "../../torch/rng_history.h"
#include "../records/recipe.h"
#include "../registry/registry.h"
#include "../room/events.h"
#include "../room/frees.h"
#include "../room/room.h"
#include "in_progress.h"

namespace rekindle {

// Performs the actions of one budget's engine. The engine's destructor asks it to destroy records
// and recipes, so it is destroyed after the engine, though it is built on the engine. The caller
// holds the session mutex.
class Recomputer final : public Performer {
public:
    Recomputer(
        InProgress& in_progress,
        Engine& engine,
        Registry& registry,
        Events& events,
        Frees& frees,
        Room& room
    )
        : in_progress_(in_progress),
          engine_(engine),
          registry_(registry),
          events_(events),
          frees_(frees),
          room_(room) {}

    Recomputer(const Recomputer&) = delete;
    Recomputer& operator=(const Recomputer&) = delete;
    ~Recomputer() = default;

    void compute(Call& call, bool in_place) override;
    void free(Storage& storage) override;
    bool swap_out(Storage& storage, bool keep) override;
    void swap_in(Storage& storage, bool early) override;
    bool is_copy_outdated(Storage& storage) override;
    void discard(Storage& storage) override;
    Bytes workspace(const Call& call) const noexcept override;
    void dispose(Storage& storage) noexcept override;
    void dispose(Call& call) noexcept override;

private:
    void wait_for_room(Call& call, bool in_place);
    void refuse_in_a_graph(const char* site) const;
    void find_places(const Recipe& recipe, bool in_place);
    Bytes room_for_slices(const Recipe& recipe);
    void compute_now(Call& call, bool in_place);
    StreamIndex order_recomputation(const Recipe& recipe, bool in_place);
    void settle_results(
        Recipe& recipe, const c10::SmallVector<StoragePtr, 2>& storages, const Order& order
    );
    template <class F>
    void or_rescue(const Recipe& recipe, bool in_place, F&& attempt);
    Order run(Recipe& recipe, bool in_place, c10::SmallVector<StoragePtr, 2>& storages);

    InProgress& in_progress_;
    Engine& engine_;
    Registry& registry_;
    Events& events_;
    Frees& frees_;
    Room& room_;
};

}  // namespace rekindle
