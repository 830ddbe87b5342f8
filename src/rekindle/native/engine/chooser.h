// What a policy sees and what it must say. Twin of rekindle.policies._base.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "../base/types.h"
#include "graph.h"

namespace rekindle {

// The state of a policy during one run. What does not matter to all has an empty body.
class Chooser {
public:
    Chooser() = default;
    Chooser(const Chooser&) = delete;
    Chooser& operator=(const Chooser&) = delete;
    Chooser(Chooser&&) = delete;
    Chooser& operator=(Chooser&&) = delete;
    virtual ~Chooser() = default;

    // Whether what came and went before the first choice matters to it, not only what is there.
    virtual bool remembers() const { return false; }

    // `storage` may be evicted from now on.
    virtual void add(Storage& storage) = 0;
    // `storage` may not be evicted any more (it is locked, held, evicted or dead).
    virtual void remove(Storage& storage) = 0;
    // The storage to let go at clock `now`; null if there is no candidate.
    virtual Storage* choose(Nanoseconds now) = 0;

    // Nobody has asked for a while: what is put off until `choose` is done now.
    virtual void catch_up(Nanoseconds now) { choose(now); }

    // The time that it would take to compute `storage` again, as far as the policy knows.
    virtual Nanoseconds recompute_ns(Storage& storage) { return storage.cost; }

    // What evicting `storage` at clock `now` would cost, whatever its size.
    virtual double loss(Storage& storage, Nanoseconds now) { return own_loss(storage, now); }

    // Quirk: a call in progress will make `storage`, which counts as evicted until then.
    virtual void expected(Storage& /*storage*/) {}

    // `storage` left memory and can be recomputed.
    virtual void evicted(Storage& /*storage*/) {}

    // `storage` is in memory again, or as expected.
    virtual void returned(Storage& /*storage*/) {}

    // The evicted `storage` will never be asked for again.
    virtual void forgotten(Storage& /*storage*/) {}

    // The last access of the candidate `storage` changed.
    virtual void touched(Storage& /*storage*/) {}

    // The cost or the parents of `storage` changed (a view of it is made).
    virtual void repriced(Storage& /*storage*/) {}

    // `storage` is about to be destroyed.
    virtual void disposed(Storage& /*storage*/) noexcept {}

protected:
    // Its own cost over its staleness.
    static double own_loss(const Storage& storage, Nanoseconds now) noexcept {
        const auto staleness = std::max<Nanoseconds>(1, now - storage.last_access);
        return static_cast<double>(storage.cost) / static_cast<double>(staleness);
    }
};

// Which costs count in a score, as in rekindle.policies._neighborhood; `classes` are not there yet.
enum class Costs : std::uint8_t { nothing, local, classes, exact, ancestors, capped };

// A score, cost / (bytes * staleness) and its ablations, least first.
struct Policy final {
    Costs costs = Costs::capped;
    bool by_size = true;
    bool by_staleness = true;
    bool root = true;  // the square root of the staleness counts

    std::unique_ptr<Chooser> bind(Graph& graph) const;
};

inline constexpr Policy THRIFTY{};
inline constexpr Policy DTR{.costs = Costs::exact, .root = false};

}  // namespace rekindle
