// Cost of evicting a storage: its own cost c0 plus the exact cost of its evicted neighborhood. Twin
// of `Exact` in rekindle.policies._neighborhood.
//
// The result does not depend on any order: neighborhoods are sets, and costs are sums of integers.
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
    Link* previous_up = nullptr;  // In the list of `lower`.
    Link* next_up = nullptr;
    Link* previous_down = nullptr;  // In the list of `upper`.
    Link* next_down = nullptr;
};

// State of a storage that was evicted once, or has such a neighbor.
struct Neighbor final {
    Storage* storage = nullptr;
    Link* up = nullptr;      // Links to its evicted parents.
    Link* down = nullptr;    // Links to its evicted children.
    std::int64_t since = 0;  // Value of `asked_` when it was evicted.
    // Upper bound of the cost that it and all storages above it lost since the last
    // `cost_decreases`.
    double lost = 0;
    std::uint64_t noticed = 0;  // Value of `age_` when it last included the expected storages.
    std::uint32_t lost_at = 0;  // Position in `lost_`, from 1; 0 if it is not there.
    std::uint32_t back_at = 0;  // Position in `back_`, from 1; 0 if it is not there.
    bool evicted = false;
    bool expected = false;
};

// Keeps the graph of evicted storages. When a storage is recomputed, each storage that reached it
// through this graph may have become cheaper. The decrease is at most the cost of the part of the
// graph on the other side.
class Exact final : public Neighborhood {
public:
    // `costs`: `exact` counts all descendants, `ancestors` none, `capped` up to a limit.
    Exact(Costs costs, Graph& graph) : descendants_(costs), graph_(graph) {}

    Exact(const Exact&) = delete;
    Exact& operator=(const Exact&) = delete;
    Exact(Exact&&) = delete;
    Exact& operator=(Exact&&) = delete;
    ~Exact() override;

    Nanoseconds cost(Storage& storage) override;
    Nanoseconds again(Storage& storage) override;
    double cost_decreases(std::vector<CostDecrease>& found, std::size_t most) override;
    void expected(Storage& storage) override;
    void evicted(Storage& storage) override;
    void returned(Storage& storage) override;
    void forgotten(Storage& storage) override;
    void repriced(Storage& storage) override;
    void disposed(Storage& storage) noexcept override;

    std::size_t put_off() const override { return back_.size() + lost_.size(); }

private:
    enum class Way : std::uint8_t { up, down };

    // A storage that returned since the last `cost_decreases`, or that was behind one that left the
    // graph. Its parents are stored, because it may leave the graph before the next
    // `cost_decreases`.
    struct Back final {
        Ref<Storage> storage;
        std::size_t first;  // Range of its parents in `back_parents_`.
        std::size_t last;
    };

    Neighbor& neighbor(Storage& storage);

    static Neighbor* evicted_neighbor(const Storage& storage) noexcept {
        Neighbor* found = storage.standing.neighbor;
        return found != nullptr && found->evicted ? found : nullptr;
    }

    void begin_walk();
    void walk_from(const Storage& storage);
    Nanoseconds walk(Way way, Nanoseconds most = std::numeric_limits<Nanoseconds>::max());
    bool walk_down_within(std::size_t most);
    void walk_parents(Storage& storage);
    void walk_children(Storage& storage);
    Nanoseconds cost_below(Storage& storage);
    void notice(Storage& storage);
    void connect(Neighbor& lower, Neighbor& upper);
    void disconnect(Link& link) noexcept;
    std::int64_t remove(Neighbor& gone) noexcept;
    void add_back(Neighbor& back);
    void remove_back(Neighbor& back) noexcept;
    void add_lost(Storage& storage, double lost);
    double remove_lost(Neighbor& lost) noexcept;
    void add_above(double loss, std::vector<CostDecrease>& found);
    void add_below(double loss, std::vector<CostDecrease>& found);
    void clear_fallen() noexcept;

    const Costs descendants_;
    Graph& graph_;
    Slab<Neighbor> neighbors_;
    Slab<Link> links_;
    std::vector<Back> back_;
    std::vector<Ref<Storage>> back_parents_;
    std::vector<Ref<Storage>> lost_;
    std::size_t n_expected_ = 0;
    std::uint64_t age_ = 1;         // Incremented when no storage is expected any more.
    std::int64_t asked_ = 0;        // Number of costs computed so far.
    std::uint64_t mark_ = 0;        // Mark of the walk in progress.
    std::vector<Neighbor*> found_;  // Storages found by that walk.
    std::vector<Neighbor*> above_;  // Those above storages that returned, in `cost_decreases`.
};

}  // namespace rekindle
