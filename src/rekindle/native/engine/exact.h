// Cost of evicting a storage: its own cost c0 plus the exact cost of its evicted neighborhood. Twin
// of `Exact` in rekindle.policies._neighborhood.
//
// The cost does not depend on the order of events: a neighborhood is a set, and its cost is a sum
// of integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "../base/slab.h"
#include "neighborhood.h"

namespace rekindle {

// Edge of the graph of evicted storages: `lower` needs `upper` to be recomputed.
struct Link final {
    Neighbor* lower;
    Neighbor* upper;
    Link* previous_up = nullptr;  // previous link in the list `lower->up` of its evicted parents
    Link* next_up = nullptr;
    // previous link in the list `upper->down` of its evicted children
    Link* previous_down = nullptr;
    Link* next_down = nullptr;
};

// State of a storage that was evicted at least once, or of a parent or child of one. In the
// comments below, "it" is the storage.
struct Neighbor final {
    Storage* storage = nullptr;
    Link* up = nullptr;      // Links to the evicted storages that it is computed from.
    Link* down = nullptr;    // Links to the evicted storages that are computed from it.
    std::uint64_t mark = 0;  // Number of the last walk that visited it (`Graph::new_mark`).
    Nanoseconds cost = 0;    // `Storage::cost` while it is evicted.
    StorageId id = 0;        // `Storage::id`.
    // Number of costs that were computed before the storage was evicted (`Exact::asked_`).
    std::int64_t since = 0;
    // Upper bound of the amount by which the cost of the storage, and the costs of storages that
    // depend on it, fell since the last `cost_decreases`.
    double lost = 0;
    // position of the storage in `Exact::lost_`, from 1; 0 if it is not in that list
    std::uint32_t lost_at = 0;
    std::uint32_t returned_at =
        0;  // position of the storage in `Exact::returned_`, from 1; 0 if it is not in that list
    bool evicted = false;
};

// Keeps the graph of evicted storages, each linked with the evicted storages that it is computed
// from. A storage leaves the graph when it is recomputed. Costs of eviction then fall for the
// storages on either side of it (ancestors and descendants): by at most the total cost of this
// storage and those on its other side.
class Exact final : public Neighborhood {
public:
    // `counted` says which evicted neighbors count: all (`exact`), only ancestors (`ancestors`), or
    // ancestors and descendants, each up to a limit (`capped`).
    Exact(Costs counted, Graph& graph)
        : counted_(counted),
          graph_(graph),
          most_above_(counted == Costs::capped ? 0 : std::numeric_limits<Nanoseconds>::max()) {}

    Exact(const Exact&) = delete;
    Exact& operator=(const Exact&) = delete;
    ~Exact() override;

    Nanoseconds cost(Storage& storage, Span& span) override;
    Nanoseconds again(Storage& storage) override;
    double cost_decreases(std::vector<CostDecrease>& found, std::size_t most, Span& span) override;
    void evicted(Storage& storage) override;
    void returned(Storage& storage) override;
    void forgotten(Storage& storage) override;
    void repriced(Storage& storage) override;
    void disposed(Storage& storage) noexcept override;

    std::size_t n_deferred() const override { return returned_.size() + lost_.size(); }

private:
    enum class Way : std::uint8_t { up, down };

    // `MOST_ANCESTORS` in rekindle.policies._neighborhood, which explains it.
    static constexpr std::int64_t MOST_ANCESTORS = 1000;

    // A storage that is in memory again since the last `cost_decreases`, or a child of one that
    // left the graph. Its parents are stored here, because the storage itself may leave the graph
    // before the next `cost_decreases`.
    struct Returned final {
        Ref<Storage> storage;
        std::size_t first;  // Its parents are `returned_parents_` from this index up to `last`.
        std::size_t last;
    };

    Neighbor& neighbor(Storage& storage);

    static Neighbor* evicted_neighbor(const Storage& storage) noexcept {
        Neighbor* found = storage.standing.neighbor;
        return found != nullptr && found->evicted ? found : nullptr;
    }

    void begin_walk();
    void walk_from(const Storage& storage);
    void walk_to(Neighbor& member);
    Nanoseconds walk(Way way, Nanoseconds most = std::numeric_limits<Nanoseconds>::max());
    bool walk_down_within(std::size_t most);
    void walk_parents(Storage& storage);
    void walk_children(Storage& storage);
    Nanoseconds cost_below(Storage& storage);
    void connect(Neighbor& lower, Neighbor& upper);
    void disconnect(Link& link) noexcept;
    std::int64_t remove(Neighbor& gone) noexcept;
    void add_returned(Neighbor& back);
    void remove_back(Neighbor& back) noexcept;
    void add_lost(Storage& storage, double lost);
    double remove_lost(Neighbor& lost) noexcept;
    void add_above(double loss, std::vector<CostDecrease>& found);
    void add_below(double loss, std::vector<CostDecrease>& found);
    void clear_fallen() noexcept;
    void raise_most_above(Nanoseconds cost) noexcept;

    const Costs counted_;
    Graph& graph_;
    Nanoseconds most_above_;  // Most (ns) that evicted ancestors add to the cost of a storage.
    std::int64_t n_evictions_ = 0;
    Nanoseconds evicted_cost_ = 0;  // Sum of the costs of the storages of all evictions so far.
    // Number of evicted storages that `cost_decreases` may visit even if that exceeds its argument
    // `most`. Each call of `cost` adds a quarter of the storages that it visits, because exact
    // decreases save later calls of `cost`.
    std::size_t credit_ = 0;
    Slab<Neighbor> neighbors_;
    Slab<Link> links_;
    std::vector<Returned> returned_;
    std::vector<Ref<Storage>> returned_parents_;
    std::vector<Ref<Storage>> lost_;
    std::int64_t asked_ = 0;        // Number of calls of `cost` so far.
    std::uint64_t mark_ = 0;        // graph mark of the current walk over evicted storages
    std::vector<Neighbor*> found_;  // Evicted storages that the current walk has found.
    // Used by `cost_decreases`: evicted ancestors of the storages that became resident again.
    std::vector<Neighbor*> above_;
};

}  // namespace rekindle
