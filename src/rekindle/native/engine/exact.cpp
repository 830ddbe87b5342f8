#include "exact.h"

#include <algorithm>

namespace rekindle {

Exact::~Exact() {
    // The evicted storages may outlive this object, so release the references to them first.
    returned_.clear();
    returned_parents_.clear();
    lost_.clear();
}

Neighbor& Exact::neighbor(Storage& storage) {
    if (storage.standing.neighbor == nullptr) {
        storage.standing.neighbor = &neighbors_.make();
        storage.standing.neighbor->storage = &storage;
        storage.standing.neighbor->id = storage.id;
    }
    return *storage.standing.neighbor;
}

void Exact::disposed(Storage& storage) noexcept {
    Neighbor* gone = storage.standing.neighbor;
    if (gone != nullptr) {
        if (gone->evicted) {
            remove(*gone);
        }
        neighbors_.drop(*gone);
        storage.standing.neighbor = nullptr;
    }
}

// -- walks over evicted storages ------------------------------------------------------------------

void Exact::begin_walk() {
    mark_ = graph_.new_mark();
    found_.clear();
}

void Exact::walk_from(const Storage& storage) {
    if (Neighbor* start = evicted_neighbor(storage)) {
        walk_to(*start);
    }
}

void Exact::walk_to(Neighbor& member) {
    if (member.mark != mark_) [[likely]] {
        member.mark = mark_;
        found_.push_back(&member);
    }
}

void Exact::walk_parents(Storage& storage) {
    each_parent(storage, [&](const Storage& parent) { walk_from(parent); });
}

void Exact::walk_children(Storage& storage) {
    each_child(storage, [&](const Storage& child) { walk_from(child); });
}

// Add to `found_` all evicted ancestors, or all evicted descendants (`way`), of the storages in
// `found_`. Return the sum of the costs of all storages in `found_`; stop once it reaches `most`.
Nanoseconds Exact::walk(Way way, Nanoseconds most) {
    Nanoseconds total = 0;
    for (std::size_t i = 0; i < found_.size() && total < most; ++i) {
        const Neighbor& member = *found_[i];
        total += member.cost;
        if (way == Way::up) {
            for (const Link* link = member.up; link != nullptr; link = link->next_up) {
                walk_to(*link->upper);
            }
        } else {
            for (const Link* link = member.down; link != nullptr; link = link->next_down) {
                walk_to(*link->lower);
            }
        }
    }
    return total;
}

Nanoseconds Exact::cost(Storage& storage, Span& span) {
    ++asked_;
    const Nanoseconds total = again(storage);
    for (const Neighbor* member : found_) {
        span.add(member->id);
    }
    credit_ += found_.size() / 4;
    return counted_ == Costs::ancestors ? total : total + cost_below(storage);
}

Nanoseconds Exact::again(Storage& storage) {
    begin_walk();
    walk_parents(storage);
    return storage.cost + std::min(walk(Way::up, most_above_), most_above_);
}

// Return the cost of the evicted descendants of `storage`. With `capped`, return at most 2/3 of the
// cost of `storage` itself.
Nanoseconds Exact::cost_below(Storage& storage) {
    begin_walk();
    walk_children(storage);
    if (counted_ == Costs::capped) {
        const Nanoseconds most = 2 * storage.cost / 3;
        return std::min(walk(Way::down, most), most);
    }
    return walk(Way::down);
}

// -- events ---------------------------------------------------------------------------------------

// Add `storage` to the graph of evicted storages, with links to its evicted parents and children.
void Exact::evicted(Storage& storage) {
    Neighbor& own = neighbor(storage);
    own.cost = storage.cost;
    const bool seen = own.returned_at != 0;
    remove_back(own);
    if (!own.evicted) {
        own.since = seen ? -1 : asked_;
        own.evicted = true;
        raise_most_above(storage.cost);
    }
    std::uint64_t mark = graph_.new_mark();
    for (const Link* link = own.up; link != nullptr; link = link->next_up) {
        link->upper->storage->mark = mark;
    }
    each_parent(storage, [&](Storage& parent) {
        Neighbor* upper = evicted_neighbor(parent);
        if (upper != nullptr && parent.mark != mark) {
            parent.mark = mark;
            connect(own, *upper);
        }
    });
    mark = graph_.new_mark();
    for (const Link* link = own.down; link != nullptr; link = link->next_down) {
        link->lower->storage->mark = mark;
    }
    each_child(storage, [&](Storage& child) {
        Neighbor* lower = evicted_neighbor(child);
        if (lower != nullptr && child.mark != mark) {
            child.mark = mark;
            connect(*lower, own);
        }
    });
}

// Raise `most_above_` to `MOST_ANCESTORS` times the average cost of the storages evicted so far. It
// never falls, because costs would then fall that `cost_decreases` does not report.
void Exact::raise_most_above(Nanoseconds cost) noexcept {
    if (counted_ == Costs::capped) {
        ++n_evictions_;
        evicted_cost_ += cost;
        const Nanoseconds most = n_evictions_ > MOST_ANCESTORS
                                     ? evicted_cost_ / n_evictions_ * MOST_ANCESTORS
                                     : evicted_cost_;
        most_above_ = std::max(most_above_, most);
    }
}

void Exact::returned(Storage& storage) {
    Neighbor& own = neighbor(storage);
    // If no cost was computed while `storage` was evicted, no stored cost includes the cost of
    // `storage`.
    if (own.evicted && remove(own) < asked_) {
        add_returned(own);
    }
}

void Exact::forgotten(Storage& storage) {
    Neighbor& own = neighbor(storage);
    double lost = static_cast<double>(storage.cost) + remove_lost(own);
    // While `storage` was evicted, it connected its descendants with its parents. So their costs
    // fall by an unknown amount as well.
    if (own.down != nullptr) {
        lost = std::numeric_limits<double>::infinity();
        for (const Link* link = own.down; link != nullptr; link = link->next_down) {
            add_returned(*link->lower);
        }
    }
    remove(own);
    each_parent(storage, [&](Storage& parent) { add_lost(parent, lost); });
}

void Exact::repriced(Storage& storage) {
    if (evicted_neighbor(storage) != nullptr) {
        evicted(storage);
    }
}

// -- the graph of evicted storages ----------------------------------------------------------------

// Link two evicted storages: the recomputation of `lower` needs `upper`.
void Exact::connect(Neighbor& lower, Neighbor& upper) {
    Link& link = links_.make(Link{&lower, &upper});
    link.next_up = lower.up;
    if (lower.up != nullptr) {
        lower.up->previous_up = &link;
    }
    lower.up = &link;
    link.next_down = upper.down;
    if (upper.down != nullptr) {
        upper.down->previous_down = &link;
    }
    upper.down = &link;
}

void Exact::disconnect(Link& link) noexcept {
    (link.previous_up != nullptr ? link.previous_up->next_up : link.lower->up) = link.next_up;
    if (link.next_up != nullptr) {
        link.next_up->previous_up = link.previous_up;
    }
    (link.previous_down != nullptr ? link.previous_down->next_down : link.upper->down) =
        link.next_down;
    if (link.next_down != nullptr) {
        link.next_down->previous_down = link.previous_down;
    }
    links_.drop(link);
}

// Remove a storage from the graph of evicted storages. Return its `since`: the number of costs
// computed before its eviction.
std::int64_t Exact::remove(Neighbor& gone) noexcept {
    while (gone.up != nullptr) {
        disconnect(*gone.up);
    }
    while (gone.down != nullptr) {
        disconnect(*gone.down);
    }
    gone.evicted = false;
    return gone.since;
}

// -- cost decreases -------------------------------------------------------------------------------

// Record that the storage of `back` is in memory again, together with its current parents.
void Exact::add_returned(Neighbor& back) {
    const std::size_t first = returned_parents_.size();
    each_parent(*back.storage, [&](Storage& parent) { returned_parents_.emplace_back(&parent); });
    if (back.returned_at == 0) {
        returned_.push_back({Ref<Storage>(back.storage), 0, 0});
        back.returned_at = static_cast<std::uint32_t>(returned_.size());
    }
    returned_[back.returned_at - 1].first = first;
    returned_[back.returned_at - 1].last = returned_parents_.size();
}

void Exact::remove_back(Neighbor& back) noexcept {
    if (back.returned_at != 0) {
        returned_.back().storage->standing.neighbor->returned_at = back.returned_at;
        std::swap(returned_[back.returned_at - 1], returned_.back());
        returned_.pop_back();
        back.returned_at = 0;
    }
}

// Record that the costs of `storage`, and of all storages that depend on it, may have fallen by up
// to `lost`.
void Exact::add_lost(Storage& storage, double lost) {
    Neighbor& own = neighbor(storage);
    if (own.lost_at == 0) {
        lost_.emplace_back(&storage);
        own.lost_at = static_cast<std::uint32_t>(lost_.size());
        own.lost = 0;
    }
    own.lost += lost;
}

double Exact::remove_lost(Neighbor& lost) noexcept {
    if (lost.lost_at == 0) {
        return 0;
    }
    lost_.back()->standing.neighbor->lost_at = lost.lost_at;
    std::swap(lost_[lost.lost_at - 1], lost_.back());
    lost_.pop_back();
    lost.lost_at = 0;
    return lost.lost;
}

// When a storage is in memory again, it no longer connects its evicted ancestors with its evicted
// descendants. The costs on either side fall by at most the sum of the costs on the other. In a
// tight budget a long evicted chain lies below each recomputed value. If visiting that chain would
// take more than `most` storages (or `credit_`, if that is more), the bounds are coarser: each
// candidate whose cost may have included the recomputed value is assumed to have become cheaper by
// the whole sum, and the decrease of the costs above the chain counts as unknown.
double Exact::cost_decreases(std::vector<CostDecrease>& found, std::size_t most, Span& span) {
    if (returned_.empty() && lost_.empty()) {
        return 0;
    }
    double fell = 0;
    begin_walk();
    for (const Returned& back : returned_) {
        fell += static_cast<double>(back.storage->cost);
        for (std::size_t i = back.first; i < back.last; ++i) {
            walk_from(*returned_parents_[i]);
        }
    }
    for (const Ref<Storage>& lost : lost_) {
        fell += lost->standing.neighbor->lost;
        walk_from(*lost);
    }
    const double loss_below = fell + static_cast<double>(walk(Way::up));
    above_.swap(found_);
    begin_walk();
    for (const Returned& back : returned_) {
        walk_children(*back.storage);
    }
    const bool many = !walk_down_within(std::max(most, credit_));
    if (found_.size() > most) {
        credit_ -= std::min(credit_, found_.size());
    }
    if (counted_ == Costs::exact && !many) {
        add_above(fell + static_cast<double>(walk(Way::down)), found);
    } else if (counted_ != Costs::ancestors) {
        add_above(std::numeric_limits<double>::infinity(), found);
    }
    if (many) {
        for (const Returned& back : returned_) {
            span.add(back.storage->id);
        }
    } else {
        add_below(loss_below, found);
    }
    clear_fallen();
    return many ? loss_below : 0;
}

// Add all evicted descendants of the storages in `found_` to `found_`. Stop and return false if
// there are more than `most`.
bool Exact::walk_down_within(std::size_t most) {
    std::size_t visited = 0;
    while (visited < found_.size() && found_.size() <= most) {
        const Neighbor& member = *found_[visited++];
        for (const Link* link = member.down; link != nullptr; link = link->next_down) {
            walk_to(*link->lower);
        }
    }
    return found_.size() <= most;
}

// Add to `found` the evicted ancestors of the storages that are in memory again. Each cost fell by
// at most `loss`; with `capped`, by at most 2/3 of the storage's own cost.
void Exact::add_above(double loss, std::vector<CostDecrease>& found) {
    const std::uint64_t mark = graph_.new_mark();
    const auto add = [&](Storage& storage) {
        if (storage.mark != mark) {
            storage.mark = mark;
            const bool capped = counted_ == Costs::capped;
            const Nanoseconds cap = 2 * storage.cost / 3;
            found.push_back({&storage, capped ? std::min(loss, static_cast<double>(cap)) : loss});
        }
    };
    for (const Returned& back : returned_) {
        for (std::size_t i = back.first; i < back.last; ++i) {
            add(*returned_parents_[i]);
        }
    }
    for (const Neighbor* member : above_) {
        each_parent(*member->storage, add);
    }
    for (const Ref<Storage>& lost : lost_) {
        add(*lost);
    }
}

// Add to `found` the candidates whose costs include a storage that is in memory again, as an
// ancestor. Each cost fell by at most `loss`.
void Exact::add_below(double loss, std::vector<CostDecrease>& found) {
    const std::uint64_t mark = graph_.new_mark();
    const auto add = [&](Storage& storage) {
        if (storage.standing.slot >= 0 && storage.mark != mark) {
            storage.mark = mark;
            found.push_back({&storage, loss});
        }
    };
    for (const Returned& back : returned_) {
        each_child(*back.storage, add);
    }
    for (const Neighbor* member : found_) {
        each_child(*member->storage, add);
    }
}

void Exact::clear_fallen() noexcept {
    for (const Returned& back : returned_) {
        back.storage->standing.neighbor->returned_at = 0;
    }
    for (const Ref<Storage>& lost : lost_) {
        lost->standing.neighbor->lost_at = 0;
    }
    returned_.clear();
    returned_parents_.clear();
    lost_.clear();
}

}  // namespace rekindle
