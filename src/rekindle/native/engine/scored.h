// Chooses the candidate with the lowest score, cost / (bytes * staleness) or a variant without one
// of the factors. Twin of rekindle.policies._scored, which explains why costs are updated lazily.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "chooser.h"
#include "envelope.h"
#include "neighborhood.h"
#include "spans.h"

namespace rekindle {

// Policy that evicts the candidate with the lowest score. Among equal scores it takes the storage
// that became a candidate last.
class ScoredChooser final : public Chooser {
public:
    ScoredChooser(std::unique_ptr<Neighborhood> neighborhood, const Policy& policy);

    bool remembers() const override { return neighborhood_->remembers(); }

    void add(Storage& storage) override { enqueue_update(storage, Standing::News::candidate); }

    void touched(Storage& storage) override { enqueue_update(storage, Standing::News::candidate); }

    void remove(Storage& storage) override;
    Storage* choose(Nanoseconds now) override;

    Nanoseconds recompute_ns(Storage& storage) override { return neighborhood_->again(storage); }

    double loss(Storage& storage, Nanoseconds now) override;

    void evicted(Storage& storage) override;
    void returned(Storage& storage) override;
    void forgotten(Storage& storage) override;
    void repriced(Storage& storage) override;
    void disposed(Storage& storage) noexcept override;

private:
    static constexpr double NOT_DUE = -1;  // value of `due` if no entry of the heap `due_` is valid

    // State of the candidate whose line is in one slot of the `Envelope`.
    struct Member final {
        Storage* storage = nullptr;
        // Stored cost of evicting the storage now: exact, or a lower bound.
        double price = 0;
        // `price` is a lower bound of the cost until `all_fell_` exceeds this.
        double due = NOT_DUE;
        // Value of `changes_` when `price` was computed exactly; negative if `price` is only a
        // lower bound.
        std::int64_t priced = -1;
    };

    struct Due final {
        double at;
        std::size_t slot;
    };

    Member& member(const Storage& storage) {
        return members_[static_cast<std::size_t>(storage.standing.slot)];
    }

    double power(double number) const noexcept { return root_ ? number * number : number; }

    double least(const Storage& storage) const;
    void enqueue_update(Storage& storage, Standing::News news);
    void dequeue_update(Storage& storage) noexcept;
    void listen();
    void lower();
    void lower(Member& fell, double fall);
    void lower_all();
    bool lower_within(const Span& span, double fall);
    void lower_due();
    void give_slack(Member& member, double due);
    void expect_fall(Member& member, double due);
    void catch_up();
    void take_out(Storage& storage);
    void reprice(Member& member, double price);

    const std::unique_ptr<Neighborhood> neighborhood_;
    const bool by_size_;
    const bool by_staleness_;
    const bool root_;
    Envelope lines_;
    std::size_t n_lines_ = 0;
    std::vector<Member> members_;
    std::int64_t changes_ = 0;
    // Storages whose updates are deferred to the next `choose`: they became candidates, were
    // accessed, or ceased to be candidates. Most storages that an operator locks are candidates
    // again before the next `choose`, and their costs stay valid.
    std::vector<Storage*> news_;
    std::vector<CostDecrease> cost_decreases_;
    Spans spans_;  // Ids of the evicted ancestors that each stored cost includes.
    std::vector<Spans::Slot> reached_;
    Nanoseconds now_ = 0;  // Clock of the last `choose`.
    // `all_fell_`: upper bound of how much any cost has fallen since the start. `due_`: for each
    // stored price, the value of `all_fell_` from which on it may exceed the cost. It is a heap
    // with the smallest value first, and may contain outdated entries.
    double all_fell_ = 0;
    std::vector<Due> due_;
};

}  // namespace rekindle
