// Cost of evicting a storage: its own cost plus the cost of its evicted neighborhood (ancestors and
// descendants). Twin of rekindle.policies._neighborhood, which explains it.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "../base/types.h"
#include "chooser.h"
#include "graph.h"
#include "spans.h"

namespace rekindle {

// A storage whose cost of eviction may have decreased, and an upper bound of the decrease.
struct CostDecrease final {
    Storage* storage;
    double fall;
};

// Computes the cost of eviction in a policy's score, and reports storages whose cost may have
// decreased.
class Neighborhood {
public:
    Neighborhood() = default;
    Neighborhood(const Neighborhood&) = delete;
    Neighborhood& operator=(const Neighborhood&) = delete;
    virtual ~Neighborhood() = default;

    virtual bool remembers() const { return false; }

    // Return the cost (ns) of evicting the resident `storage` now. Add the ids of the evicted
    // ancestors that the cost includes to `span`.
    virtual Nanoseconds cost(Storage& storage, Span& span) = 0;

    // Return the estimated time (ns) to recompute `storage`.
    virtual Nanoseconds again(Storage& storage) { return storage.cost; }

    // Return a lower bound of `cost(storage)` that is fast to compute.
    virtual Nanoseconds least(const Storage& storage) const { return storage.cost; }

    // Add to `found` the storages whose cost may have decreased since the last call of this
    // function, and return 0. If that would visit more than `most` evicted storages, add only some
    // of them, extend `span` to contain some storage ids, and return an amount in ns. The cost of
    // each storage that included an evicted ancestor with an id in `span` may then have decreased
    // by up to this amount.
    virtual double cost_decreases(
        std::vector<CostDecrease>& /*found*/, std::size_t /*most*/, Span& /*span*/
    ) {
        return 0;
    }

    // Return the number of events that the next `cost_decreases` will process. Each of them keeps a
    // storage alive.
    virtual std::size_t n_deferred() const { return 0; }

    virtual void evicted(Storage& /*storage*/) {}

    virtual void returned(Storage& /*storage*/) {}

    virtual void forgotten(Storage& /*storage*/) {}

    virtual void repriced(Storage& /*storage*/) {}

    virtual void disposed(Storage& /*storage*/) noexcept {}
};

// Cost that is the same for every storage.
class Nothing final : public Neighborhood {
public:
    Nanoseconds cost(Storage& /*storage*/, Span& /*span*/) override { return 1; }

    Nanoseconds least(const Storage& /*storage*/) const override { return 1; }
};

// Cost that counts only the storage's own recomputation, without its evicted neighbors.
class Local final : public Neighborhood {
public:
    Nanoseconds cost(Storage& storage, Span& /*span*/) override { return storage.cost; }
};

std::unique_ptr<Neighborhood> bind(Costs costs, Graph& graph);

}  // namespace rekindle
