// Chooses the candidate with the lowest score of the form cost / (bytes * staleness), or an
// ablation of it. Twin of rekindle.policies._scored, which explains the lazy cost updates.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "chooser.h"
#include "envelope.h"
#include "neighborhood.h"

namespace rekindle {

// Tracks candidates. Ties go to the storage that became a candidate last.
class ScoredChooser final : public Chooser {
public:
    ScoredChooser(std::unique_ptr<Neighborhood> neighborhood, const Policy& policy);

    bool remembers() const override { return neighborhood_->remembers(); }

    void add(Storage& storage) override { hear(storage, Standing::News::candidate); }

    void touched(Storage& storage) override { hear(storage, Standing::News::candidate); }

    void remove(Storage& storage) override;
    Storage* choose(Nanoseconds now) override;

    Nanoseconds recompute_ns(Storage& storage) override { return neighborhood_->again(storage); }

    double loss(Storage& storage, Nanoseconds now) override;

    void expected(Storage& storage) override;
    void evicted(Storage& storage) override;
    void returned(Storage& storage) override;
    void forgotten(Storage& storage) override;
    void repriced(Storage& storage) override;
    void disposed(Storage& storage) noexcept override;

private:
    // State of the line in one slot.
    struct Member final {
        Storage* storage = nullptr;
        double price = 0;
        double due = -1;  // `price` is a lower bound until `all_fell_` is more than this.
        // Value of `changes_` when the cost was computed; negative if it is only a lower bound.
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
    void hear(Storage& storage, Standing::News news);
    void unhear(Storage& storage) noexcept;
    void listen();
    void lower();
    void lower(Member& fell, double fall);
    void lower_all();
    void give_slack(Member& member);
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
    // Updates deferred until the next choice: storages that became candidates, were touched, or are
    // no candidates any more. Most storages that an operator locks are candidates again before the
    // next choice. Their costs stay valid.
    std::vector<Storage*> news_;
    std::vector<CostDecrease> cost_decreases_;
    Nanoseconds now_ = 0;  // Clock of the last choice.
    // What every cost may have lost since the start, and when prices are no lower bounds any more:
    // a heap, the earliest first, with entries that are out of date.
    double all_fell_ = 0;
    std::vector<Due> due_;
};

}  // namespace rekindle
