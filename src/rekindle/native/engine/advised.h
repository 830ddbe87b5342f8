// Wraps a policy so that a plan is followed first: storages that the plan has marked as unneeded
// are evicted before the policy is asked. Twin of rekindle.policies._advised.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "chooser.h"

namespace rekindle {

// Evicts marked storages in the order in which they became candidates; otherwise asks the wrapped
// policy.
class AdvisedChooser final : public Chooser {
public:
    explicit AdvisedChooser(std::unique_ptr<Chooser> chooser) : chooser_(std::move(chooser)) {}

    // Mark `storage`: the plan does not need its value until the plan recomputes it.
    void mark(Storage& storage);
    // Remove the mark: the plan needs the value from now on.
    void unmark(Storage& storage);
    // Remove all marks. The policy, which was not asked meanwhile, processes its pending updates.
    void clear(Nanoseconds now);
    // Return the bytes of marked candidates, without those that `inputs` read. `mark` is a fresh
    // mark of the graph.
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
    std::uint32_t age_ = 1;        // A storage is marked if its `standing.marked` equals this.
    std::vector<Storage*> ready_;  // Marked candidates, in that order; null is a gap.
    std::size_t first_ready_ = 0;  // Index before which there are only gaps.
    std::size_t n_ready_ = 0;
    Bytes spare_ = 0;      // Bytes of `ready_`.
    bool behind_ = false;  // True if marks decided since the policy was asked last.
};

}  // namespace rekindle
