// c0 plus the cost of the evicted neighborhood, in full. Twin of `Exact` in
// rekindle.policies._neighborhood.
//
// Nothing here depends on an order: neighborhoods are sets, and sums of integers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "../base/slab.h"
#include "neighborhood.h"

namespace rekindle {

// `lower` is evicted and needs `upper`, which is evicted as well.
struct Link final {
    Neighbor* lower;
    Neighbor* upper;
    Link* previous_up = nullptr;  // among those of `lower`
    Link* next_up = nullptr;
    Link* previous_down = nullptr;  // among those of `upper`
    Link* next_down = nullptr;
};

// What is known of a storage that was evicted once, or is next to one.
struct Neighbor final {
    Storage* storage = nullptr;
    Link* up = nullptr;         // to its evicted parents
    Link* down = nullptr;       // to its evicted children
    std::int64_t since = 0;     // how often a cost had been asked for when it was evicted
    double lost = 0;            // what it and all above it lost at most since `fallen`
    std::uint64_t noticed = 0;  // the age in which it noticed those that are expected
    std::uint32_t lost_at = 0;  // where it is among those that lost, from 1
    std::uint32_t back_at = 0;  // where it is among those that returned, from 1
    bool evicted = false;
    bool expected = false;
};

// Keeps the graph of what is evicted. When storages return, everything that reached them through
// that graph may have become cheaper, by no more than the cost of what lies on their other side.
class Exact final : public Neighborhood {
public:
    // `costs`: with all descendants, none (`ancestors`), or `capped`.
    Exact(Costs costs, Graph& graph) : descendants_(costs), graph_(graph) {}

    Exact(const Exact&) = delete;
    Exact& operator=(const Exact&) = delete;
    Exact(Exact&&) = delete;
    Exact& operator=(Exact&&) = delete;
    ~Exact() override;

    Nanoseconds cost(Storage& storage) override;
    Nanoseconds again(Storage& storage) override;
    void fallen(std::vector<Fallen>& found) override;
    void expected(Storage& storage) override;
    void evicted(Storage& storage) override;
    void returned(Storage& storage) override;
    void forgotten(Storage& storage) override;
    void repriced(Storage& storage) override;
    void disposed(Storage& storage) noexcept override;

    std::size_t put_off() const override { return back_.size() + lost_.size(); }

private:
    enum class Way : std::uint8_t { up, down };

    // What returned since `fallen`, or what was behind something that is gone for good, and its
    // parents then: it may have left the graph meanwhile.
    struct Back final {
        Ref<Storage> storage;
        std::size_t first;  // of its parents in `back_parents_`
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
    static void fall(Storage& storage, double most, std::vector<Fallen>& found, std::uint64_t mark);
    void clear_fallen() noexcept;

    const Costs descendants_;
    Graph& graph_;
    Slab<Neighbor> neighbors_;
    Slab<Link> links_;
    std::vector<Back> back_;
    std::vector<Ref<Storage>> back_parents_;
    std::vector<Ref<Storage>> lost_;
    std::size_t n_expected_ = 0;
    std::uint64_t age_ = 1;         // of what was noticed
    std::int64_t asked_ = 0;        // how often a cost was
    std::uint64_t mark_ = 0;        // of the walk in progress
    std::vector<Neighbor*> found_;  // by that walk
};

}  // namespace rekindle
