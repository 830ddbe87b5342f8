// Wraps a policy so that a plan comes first: storages that the plan does not need for now are
// evicted before the policy is asked. Twin of rekindle.policies._advised.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "chooser.h"

namespace rekindle {

// Policy that first evicts the storages that a plan has marked as not needed, in the order in which
// they became candidates. If there is none, it asks the wrapped policy.
class AdvisedChooser final : public Chooser {
public:
    explicit AdvisedChooser(std::unique_ptr<Chooser> chooser) : chooser_(std::move(chooser)) {}

    // Mark `storage`, so that it is evicted first: the plan does not need it until the plan itself
    // restores it.
    void mark(Storage& storage);
    // Remove the mark of `storage`, because the plan needs the value of `storage` from now on.
    void unmark(Storage& storage);
    // Remove all marks, so that the wrapped policy decides alone. If marks have decided evictions
    // since the wrapped policy last chose, that policy first processes the updates that it
    // deferred.
    void clear(Nanoseconds now);
    // Return the bytes of all candidates that the plan has marked as not needed, except those that
    // `inputs` read. `mark` has nothing to do with the plan: it is the number of a new walk over
    // the graph (`Graph::new_mark`). This function writes it to the storages of `inputs`, so that
    // it subtracts each storage only once.
    Bytes spare_beside(std::span<const Edge> inputs, std::uint64_t mark) const;

    void add(Storage& storage) override;
    void remove(Storage& storage) override;
    Storage* choose(Nanoseconds now) override;

    Nanoseconds recompute_ns(Storage& storage) override { return chooser_->recompute_ns(storage); }

    double loss(Storage& storage, Nanoseconds now) override { return chooser_->loss(storage, now); }

    void evicted(Storage& storage) override { chooser_->evicted(storage); }

    void returned(Storage& storage) override { chooser_->returned(storage); }

    void forgotten(Storage& storage) override { chooser_->forgotten(storage); }

    void touched(Storage& storage) override { chooser_->touched(storage); }

    void repriced(Storage& storage) override { chooser_->repriced(storage); }

    void disposed(Storage& storage) noexcept override;

private:
    void make_ready(Storage& storage);
    void unready(Storage& storage) noexcept;
    void remove_null_entries();

    std::unique_ptr<Chooser> chooser_;
    // A storage is marked if its `standing.marked` equals this number. Incrementing the number
    // removes all marks at once.
    std::uint32_t age_ = 1;
    // Candidates that the plan has marked, in the order in which they are evicted. An entry is null
    // if its storage was removed.
    std::vector<Storage*> ready_;
    std::size_t first_ready_ = 0;  // All entries of `ready_` before this index are null.
    std::size_t n_ready_ = 0;
    Bytes spare_ = 0;      // Bytes of all storages that the plan has marked (`ready_`).
    bool behind_ = false;  // Marks have decided an eviction since the wrapped policy chose last.
};

}  // namespace rekindle
