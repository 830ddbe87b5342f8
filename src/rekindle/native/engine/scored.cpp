#include "scored.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <utility>

namespace rekindle {

namespace {

// Replaces a recomputation cost of 0, by which the score cannot be divided. The benefit is then
// nearly infinite, but larger storages still come first.
constexpr double LEAST = 1e-9;

// Largest number of deferred updates. The next `choose`, which processes them, may never come, so
// more would take memory without limit. Processing them early changes no choice.
constexpr std::size_t MOST_PUT_OFF = 1 << 16;

// Number of evicted storages that may always be visited to find out whose cost decreased. If there
// are many more, `Spans` finds the candidates whose cost may have decreased. If there are more than
// `FEW` of these, all costs are assumed to have decreased.
constexpr std::size_t FEW = 32;

// If all costs decrease again and again, the stored lower bound of a cost (its price) is lowered in
// advance by this fraction, so that it need not be lowered each time.
constexpr double SLACK = 1.0 / 16;

double or_least(Nanoseconds cost) {
    return cost != 0 ? static_cast<double>(cost) : LEAST;
}

}  // namespace

ScoredChooser::ScoredChooser(std::unique_ptr<Neighborhood> neighborhood, const Policy& policy)
    : neighborhood_(std::move(neighborhood)),
      by_size_(policy.by_size),
      by_staleness_(policy.by_staleness),
      root_(policy.root),
      lines_(policy.by_staleness) {}

std::unique_ptr<Chooser> Policy::bind(Graph& graph) const {
    return std::make_unique<ScoredChooser>(rekindle::bind(costs, graph), *this);
}

// -- events ---------------------------------------------------------------------------------------

void ScoredChooser::enqueue_update(Storage& storage, Standing::News news) {
    if (storage.standing.news == Standing::News::none) {
        storage.standing.news_at = static_cast<std::uint32_t>(news_.size());
        news_.push_back(&storage);
    }
    storage.standing.news = news;
}

// Remove the deferred update of `storage`. The order of updates does not matter, so the last one
// takes its place.
void ScoredChooser::dequeue_update(Storage& storage) noexcept {
    if (storage.standing.news != Standing::News::none) {
        news_.back()->standing.news_at = storage.standing.news_at;
        news_[storage.standing.news_at] = news_.back();
        news_.pop_back();
        storage.standing.news = Standing::News::none;
    }
}

void ScoredChooser::remove(Storage& storage) {
    if (storage.standing.slot >= 0) {
        enqueue_update(storage, Standing::News::removed);
    } else {
        dequeue_update(storage);
    }
}

void ScoredChooser::evicted(Storage& storage) {
    neighborhood_->evicted(storage);
    // If the `Envelope` has a line of this evicted storage, remove it: the line will differ when
    // the storage is in memory again.
    if (storage.standing.slot >= 0) {
        take_out(storage);
        dequeue_update(storage);
    }
    ++changes_;
}

void ScoredChooser::returned(Storage& storage) {
    neighborhood_->returned(storage);
    ++changes_;
    catch_up();
}

void ScoredChooser::forgotten(Storage& storage) {
    neighborhood_->forgotten(storage);
    ++changes_;
    catch_up();
}

void ScoredChooser::catch_up() {
    if (neighborhood_->n_deferred() > MOST_PUT_OFF) {
        lower();
    }
}

void ScoredChooser::repriced(Storage& storage) {
    neighborhood_->repriced(storage);
    // The cost may have decreased, so start with a lower bound of it as the price.
    if (storage.standing.slot >= 0) {
        reprice(member(storage), least(storage));
    }
    ++changes_;
}

void ScoredChooser::disposed(Storage& storage) noexcept {
    dequeue_update(storage);
    if (storage.standing.slot >= 0) {
        take_out(storage);
    }
    neighborhood_->disposed(storage);
}

double ScoredChooser::loss(Storage& storage, Nanoseconds now) {
    Span span;
    const auto cost = static_cast<double>(neighborhood_->cost(storage, span));
    if (!by_staleness_) {
        return cost;
    }
    const auto staleness = static_cast<double>(std::max<Nanoseconds>(1, now - storage.last_access));
    return cost / (root_ ? std::sqrt(staleness) : staleness);
}

// -- choosing the victim --------------------------------------------------------------------------

Storage* ScoredChooser::choose(Nanoseconds now) {
    now_ = now;
    listen();
    lower();
    if (n_lines_ == 0) {
        return nullptr;
    }
    for (;;) {
        Member& best = members_[static_cast<std::size_t>(lines_.best(now))];
        if (best.priced == changes_) {
            return best.storage;
        }
        best.priced = changes_;
        Span span;
        const double price = or_least(neighborhood_->cost(*best.storage, span));
        spans_.set(best.storage->standing.slot, span);
        if (price > least(*best.storage)) {
            expect_fall(best, all_fell_);
        }
        if (price == best.price) {
            return best.storage;
        }
        reprice(best, price);
    }
}

// Apply the deferred updates of candidates to their lines in the `Envelope`.
void ScoredChooser::listen() {
    for (Storage* storage : news_) {
        Standing& standing = storage->standing;
        const Standing::News news = std::exchange(standing.news, Standing::News::none);
        if (news == Standing::News::removed) {
            take_out(*storage);
            continue;
        }
        if (standing.slot < 0) {
            const double price = least(*storage);
            standing.slot = lines_.add(power(price));
            const std::size_t needed = static_cast<std::size_t>(standing.slot) + 1;
            if (members_.size() < needed) {
                members_.resize(needed);
            }
            Member& added = member(*storage);
            added = {storage, price, added.due};  // an entry of `due_` still belongs to this slot
            ++n_lines_;
        }
        const double size = by_size_ ? power(static_cast<double>(storage->nbytes)) : 1.0;
        lines_.renew(standing.slot, size, storage->last_access, storage->order, now_);
    }
    news_.clear();
}

void ScoredChooser::take_out(Storage& storage) {
    lines_.remove(storage.standing.slot);
    spans_.set(storage.standing.slot, {});
    member(storage).storage = nullptr;
    storage.standing.slot = -1;
    --n_lines_;
}

double ScoredChooser::least(const Storage& storage) const {
    return or_least(neighborhood_->least(storage));
}

void ScoredChooser::reprice(Member& member, double price) {
    member.price = price;
    lines_.reprice(member.storage->standing.slot, power(price), now_);
}

// Lower the stored price of each storage whose cost may have decreased, so that the price is a
// lower bound of the cost again.
void ScoredChooser::lower() {
    cost_decreases_.clear();
    Span span;
    const double others = neighborhood_->cost_decreases(cost_decreases_, FEW, span);
    for (const auto& [storage, fall] : cost_decreases_) {
        if (storage->standing.slot >= 0 && fall != 0) {
            lower(member(*storage), fall);
        }
    }
    if (others == std::numeric_limits<double>::infinity()) {
        lower_all();
    } else if (others != 0 && !lower_within(span, others)) {
        all_fell_ += others;
        lower_due();
    }
}

// Lower the stored prices whose costs include evicted storages with ids in `span`. Return false,
// and lower none, if there are too many.
bool ScoredChooser::lower_within(const Span& span, double fall) {
    reached_.clear();
    if (!spans_.find(span, FEW, reached_)) {
        return false;
    }
    for (const Spans::Slot slot : reached_) {
        lower(members_[static_cast<std::size_t>(slot)], fall);
    }
    return true;
}

// Lower the stored prices that are no lower bounds of the costs any more since `all_fell_`
// increased.
void ScoredChooser::lower_due() {
    while (!due_.empty() && due_.front().at < all_fell_) {
        std::ranges::pop_heap(due_, std::ranges::greater(), &Due::at);
        const Due due = due_.back();
        due_.pop_back();
        Member& each = members_[due.slot];
        if (each.due == due.at) {
            each.due = NOT_DUE;
            if (each.storage != nullptr) {
                give_slack(each, due.at);
            }
        }
    }
}

// Lower all stored prices to lower bounds of the costs, because the decrease of the costs is
// unknown.
void ScoredChooser::lower_all() {
    for (Member& each : members_) {
        each.due = NOT_DUE;
        if (each.storage != nullptr) {
            lower(each, std::numeric_limits<double>::infinity());
        }
    }
    due_.clear();
}

void ScoredChooser::lower(Member& fell, double fall) {
    const double price = std::max(least(*fell.storage), fell.price - fall);
    if (price != fell.price) {
        reprice(fell, price);
    }
    fell.priced = -1;
}

// Lower the price of `member` by more than its cost may have decreased so far. So the price stays a
// lower bound of the cost for a while.
void ScoredChooser::give_slack(Member& member, double due) {
    const double fell = all_fell_ - due;
    const double slack = SLACK * member.price;
    lower(member, fell + slack);
    if (member.price > least(*member.storage)) {
        expect_fall(member, all_fell_ + slack);
    }
}

// Record that the price of `member` is a lower bound of its cost until `all_fell_` exceeds `due`.
// If no cost decreases, a slot has one entry in `due_`, however many storages use the slot one
// after the other.
void ScoredChooser::expect_fall(Member& member, double due) {
    if (member.due == due) {
        return;
    }
    member.due = due;
    due_.push_back({due, static_cast<std::size_t>(member.storage->standing.slot)});
    std::ranges::push_heap(due_, std::ranges::greater(), &Due::at);
}

}  // namespace rekindle
