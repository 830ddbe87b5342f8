// Least score first, for scores of the form cost / (bytes * staleness) and its ablations. Twin of
// rekindle.policies._scored, where the lazy pricing is explained.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "chooser.h"
#include "envelope.h"
#include "neighborhood.h"

namespace rekindle {

// Follows candidates; ties go to the storage that last became a candidate.
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
    // What is known of the line in one slot.
    struct Member final {
        Storage* storage = nullptr;
        double price = 0;
        std::int64_t priced = -1;  // when, in changes; negative: only a lower bound
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
    // What became a candidate or was touched since the last choice, or is none any more. Most of
    // what is locked for an operator is back before anybody chooses: it keeps its price.
    std::vector<Storage*> news_;
    std::vector<Fallen> fallen_;
};

}  // namespace rekindle
