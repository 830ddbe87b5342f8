// Interface between the engine and an eviction policy: the events that the engine reports to the
// policy, and the storage that the policy chooses to evict. Twin of rekindle.policies._base.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "../base/types.h"
#include "graph.h"

namespace rekindle {

// State of an eviction policy during one run. The engine reports events to it. Events that only
// some policies need do nothing by default.
class Chooser {
public:
    Chooser() = default;
    Chooser(const Chooser&) = delete;
    Chooser& operator=(const Chooser&) = delete;
    virtual ~Chooser() = default;

    // Return true if the policy depends on events before its first choice, and not only on the
    // current candidates. Such a policy is active from the start of the run.
    virtual bool remembers() const { return false; }

    // Called when `storage` became a candidate for eviction.
    virtual void add(Storage& storage) = 0;
    // Called when `storage` is not a candidate for eviction any more: it is locked (a running
    // operator reads it), user-held, evicted, or dead (the program cannot reach it).
    virtual void remove(Storage& storage) = 0;
    // Return the storage to evict at clock `now`; null if there is no candidate.
    virtual Storage* choose(Nanoseconds now) = 0;

    // Process the updates that the policy deferred to its next `choose`. Called if plan marks have
    // decided evictions for a while, without calling `choose`.
    virtual void catch_up(Nanoseconds now) { choose(now); }

    // Return the estimated time (ns) to recompute `storage`.
    virtual Nanoseconds recompute_ns(Storage& storage) { return storage.cost; }

    // Return the loss of evicting `storage` at clock `now`: its score, but not divided by its size.
    virtual double loss(Storage& storage, Nanoseconds now) { return own_loss(storage, now); }

    // Called when `storage` was evicted and can be recomputed.
    virtual void evicted(Storage& /*storage*/) {}

    // Called when the evicted `storage` is in memory again.
    virtual void returned(Storage& /*storage*/) {}

    // Called when the evicted `storage` will never be needed again.
    virtual void forgotten(Storage& /*storage*/) {}

    // Called when the program accessed the candidate `storage`, so that its last access changed.
    virtual void touched(Storage& /*storage*/) {}

    // Called when the cost or the parents of `storage` changed, because the program made a view of
    // it.
    virtual void repriced(Storage& /*storage*/) {}

    // Called when `storage` is about to be destroyed.
    virtual void disposed(Storage& /*storage*/) noexcept {}

protected:
    // Return the storage's own cost (without evicted neighbors) divided by its staleness, the time
    // since its last access.
    static double own_loss(const Storage& storage, Nanoseconds now) noexcept {
        const auto staleness = std::max<Nanoseconds>(1, now - storage.last_access);
        return static_cast<double>(storage.cost) / static_cast<double>(staleness);
    }
};

// Costs of other storages that a policy's score includes in addition to the storage's own cost, as
// in rekindle.policies._neighborhood. The native core does not implement `classes`.
enum class Costs : std::uint8_t { nothing, local, classes, exact, ancestors, capped };

// Policy with the score cost / (bytes * staleness), or a variant of it that leaves a factor out.
// The storage with the lowest score is evicted.
struct Policy final {
    Costs costs = Costs::capped;
    bool by_size = true;
    bool by_staleness = true;
    // True: the score contains the square root of the staleness, not the staleness itself.
    bool root = true;

    // Make the state of this eviction policy for one run of the engine with `graph`.
    std::unique_ptr<Chooser> bind(Graph& graph) const;
};

inline constexpr Policy THRIFTY{};
inline constexpr Policy DTR{.costs = Costs::exact, .root = false};

}  // namespace rekindle
