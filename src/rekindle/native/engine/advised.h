// Any policy, advised: what a plan has done with goes first, while there is such a thing. Twin of
// rekindle.policies._advised.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "chooser.h"

namespace rekindle {

class AdvisedChooser final : public Chooser {
public:
    explicit AdvisedChooser(std::unique_ptr<Chooser> chooser) : chooser_(std::move(chooser)) {}

    // The plan does not need `storage` until it has it computed again.
    void mark(Storage& storage);
    // The plan needs `storage` from now on.
    void unmark(Storage& storage);
    // Nothing is marked any more: the policy decides alone, and catches up.
    void clear(Nanoseconds now);
    // Bytes of what may be let go although nothing that `inputs` read may. `mark` is a new one.
    Bytes spare_beside(std::span<const Edge> inputs, std::uint64_t mark) const;

    void add(Storage& storage) override;
    void remove(Storage& storage) override;
    Storage* choose(Nanoseconds now) override;

    Nanoseconds recompute_ns(Storage& storage) override { return chooser_->recompute_ns(storage); }

    double loss(Storage& storage, Nanoseconds now) override { return chooser_->loss(storage, now); }

    void expected(Storage& storage) override { chooser_->expected(storage); }

    void evicted(Storage& storage) override { chooser_->evicted(storage); }

    void returned(Storage& storage) override { chooser_->returned(storage); }

    void forgotten(Storage& storage) override { chooser_->forgotten(storage); }

    void touched(Storage& storage) override { chooser_->touched(storage); }

    void repriced(Storage& storage) override { chooser_->repriced(storage); }

    void disposed(Storage& storage) noexcept override;

private:
    void make_ready(Storage& storage);
    void unready(Storage& storage) noexcept;
    void close_gaps();

    std::unique_ptr<Chooser> chooser_;
    std::uint32_t age_ = 1;        // what is marked has this one
    std::vector<Storage*> ready_;  // what is marked and may be evicted, in that order; null: a gap
    std::size_t first_ready_ = 0;  // only gaps before
    std::size_t n_ready_ = 0;
    Bytes spare_ = 0;      // of those
    bool behind_ = false;  // marks have answered since the policy was asked last
};

}  // namespace rekindle
