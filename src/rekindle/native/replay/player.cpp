#include "player.h"

#include <algorithm>

namespace rekindle {

Player::Player(
    Bytes budget,
    const Policy& policy,
    Nanoseconds recompute_limit,
    const Route* route,
    const Swap* swap,
    std::int64_t watch
)
    : watch_(watch), engine_(budget, *this, policy, route != nullptr, recompute_limit) {
    if (swap != nullptr) {
        engine_.swap_with(*swap);
    }
    if (route != nullptr) {
        follower_.emplace(engine_, *route, *this);
    }
}

// -- actions of the engine ------------------------------------------------------------------------

void Player::acted(std::int64_t number, Action action) {
    actions.push_back(actions_end * number + action);
    clock.push_back(engine_.clock);
    memory.push_back(engine_.memory);
}

void Player::compute(Call& call, bool in_place) {
    recomputations += call.ran ? 1 : 0;
    acted(call.id, in_place ? computed_in_place : computed);
}

void Player::free(Storage& storage) {
    ++evictions;
    acted(storage.id, freed);
}

// Return true if the current transfer must fail, because an event `fail` announced the failure.
bool Player::fails() noexcept {
    fail_in_ -= fail_in_ >= 0 ? 1 : 0;
    return fail_in_ == 0;
}

bool Player::swap_out(Storage& storage, bool keep) {
    evictions += keep ? 0 : 1;
    acted(storage.id, keep ? swapped_out_and_kept : swapped_out);
    static_cast<PlainStorage&>(storage).outdated = false;
    return !fails();
}

void Player::swap_in(Storage& storage, bool /*early*/) {
    acted(storage.id, swapped_in);
    if (storage.replayable && fails()) {
        engine_.swap_in_failed(storage);
    }
}

void Player::discard(Storage& storage) {
    acted(storage.id, discarded);
}

void Player::dispose(Storage& storage) noexcept {
    storages_.drop(static_cast<PlainStorage&>(storage));
}

void Player::dispose(Call& call) noexcept {
    calls_.drop(static_cast<PlainCall&>(call));
}

std::size_t Player::bookkeeping() const noexcept {
    return storages_.nbytes() + calls_.nbytes() + engine_.graph.nbytes();
}

// -- reading the stream ---------------------------------------------------------------------------

std::optional<Fault> Player::play(std::span<const std::int64_t> words) {
    words_ = words;
    position_ = 0;
    while (position_ < words_.size()) {
        const bool room = step();
        // Ignore the engine's list `idle`, because storages of a simulated program have no memory
        // to free.
        engine_.idle.clear();
        if ((watch_ & check) != 0) {
            if (const std::optional<Fault> fault = engine_.check(); fault) {
                return fault;
            }
        }
        if ((watch_ & (check | steps_only)) != 0) {
            const auto n_actions = static_cast<std::int64_t>(actions.size());
            steps.push_back(room ? n_actions : ~n_actions);
            steps.push_back(engine_.memory);
            steps.push_back(engine_.clock);
        }
    }
    if (follower_) {
        follower_->end();
    }
    return std::nullopt;
}

bool Player::step() {
    try {
        event(static_cast<Word>(next()));
    } catch (const NoRoom&) {
        if ((watch_ & forgive) == 0) {
            throw;
        }
        return false;
    }
    return true;
}

std::int64_t Player::next() {
    if (position_ >= words_.size()) {
        throw Malformed{position_};
    }
    return words_[position_++];
}

Player::Known& Player::known(std::int64_t value) {
    const auto at = static_cast<std::size_t>(value);
    if (value < 0 || at >= known_.size() || known_[at].value == nullptr) {
        throw Malformed{position_};
    }
    return known_[at];
}

void Player::evict_least_loss() {
    Storage* found = nullptr;
    double least = 0;
    for (Storage* each = engine_.first_storage(); each != nullptr; each = each->next) {
        if (each->order < 0) {
            continue;
        }
        const double loss = engine_.loss(*each);
        if (found == nullptr || std::pair(loss, each->order) < std::pair(least, found->order)) {
            found = each;
            least = loss;
        }
    }
    std::vector<Ref<Storage>> chosen;
    if (found != nullptr) {
        chosen.emplace_back(found);
    }
    engine_.evict_these(chosen);
}

void Player::event(Word word) {
    if (word == Word::call) {
        event_call();
        return;
    }
    const std::int64_t first = next();
    const std::int64_t second = next();
    switch (word) {
        case Word::account:
            engine_.account(first, second);
            return;
        case Word::make_room:
            engine_.make_room(first);
            return;
        case Word::shrink:
            engine_.shrink(first);
            return;
        case Word::evict:
            evict_least_loss();
            return;
        case Word::listen:
            engine_.listen();
            return;
        case Word::clear_reserve:
            engine_.clear_reserve();
            return;
        case Word::ahead:
            engine_.ahead();
            return;
        case Word::prefetch:
            engine_.prefetch(first < 0 ? UNLIMITED : first);
            return;
        case Word::planned:
            engine_.follow_plan(first != 0);
            return;
        case Word::step:
            engine_.step();
            return;
        case Word::anticipate:
            engine_.anticipate();
            return;
        case Word::discards:
            engine_.discards();
            return;
        case Word::measured:
            engine_.measured(first, second);
            return;
        case Word::fail:
            fail_in_ = first;
            return;
        default:
            event_about(word, known(first), second);
    }
}

void Player::event_about(Word word, Known& about, std::int64_t number) {
    Storage& storage = *about.storage;
    switch (word) {
        case Word::use:
            about_to_access(about);
            return engine_.use(*about.value);
        case Word::pin:
            about_to_access(about);
            return engine_.pin(*about.value);
        case Word::retain:
            return engine_.retain(storage);
        case Word::release:
            return engine_.release(storage);
        case Word::drop:
            return engine_.drop(storage);
        case Word::gone:
            return engine_.gone(storage);
        case Word::forget:
            return engine_.forget(storage);
        case Word::seal:
            return engine_.seal(storage);
        case Word::spoil:
            return engine_.spoil(storage);
        case Word::resize:
            return engine_.resize(storage, number);
        case Word::require:
            return engine_.require(*about.value);
        case Word::set_evictable_while_held:
            return number == 2 ? engine_.set_evictable_last(storage)
                               : engine_.set_evictable_while_held(storage, number != 0);
        case Word::lock:
            return engine_.lock(storage);
        case Word::unlock:
            return engine_.unlock(storage);
        case Word::save:
            return engine_.save(storage);
        case Word::fetch:
            return engine_.fetch(storage);
        case Word::copy_lost:
            return engine_.copy_lost(storage);
        case Word::written:
            return engine_.written(storage);
        case Word::outdate:
            static_cast<PlainStorage&>(storage).outdated = true;
            return;
        case Word::hold:
            return engine_.hold(storage);
        case Word::let:
            about = Known();
            return;
        default:
            throw Malformed{position_};
    }
}

void Player::about_to_access(const Known& about) {
    if (follower_) {
        follower_->about_to_access(*about.storage, following_);
    }
}

void Player::event_call() {
    std::int64_t flags = 0;
    std::vector<Ref<Storage>> made;
    const Ref<Call> call = read_call(flags, made);
    if (follower_) {
        follower_->before(call->id);
    }
    if ((flags & deferred) != 0) {
        engine_.defer(*call);
    } else if ((flags & admitted) != 0) {
        engine_.admit(*call, (flags & held) != 0);
    } else {
        engine_.call(*call, (flags & held) != 0);
    }
    following_ = call->id + 1;
    if (follower_) {
        for (const Ref<Storage>& storage : made) {
            follower_->made(storage->id, *storage);
        }
    }
}

Ref<Call> Player::read_call(std::int64_t& flags, std::vector<Ref<Storage>>& made) {
    const OpId id = next();
    const Nanoseconds cost = next();
    flags = next();
    const Bytes workspace = next();
    PlainCall& call = calls_.make(engine_.graph, id, cost, (flags & replayable) != 0);
    const Ref<Call> read(&call);
    call.workspace = workspace;
    call.has_workspace = workspace != 0;
    inputs_.clear();
    for (std::int64_t n = next(); n > 0; --n) {
        inputs_.push_back(known(next()).value);
    }
    engine_.graph.reads(call, inputs_);
    read_outputs(call, made);
    overwrites_.clear();
    for (std::int64_t n = next(); n > 0; --n) {
        Value* output = known(next()).value;
        overwrites_.push_back({output, known(next()).value});
    }
    engine_.graph.overwrites(call, overwrites_);
    return read;
}

void Player::read_outputs(PlainCall& call, std::vector<Ref<Storage>>& made) {
    for (std::int64_t n = next(); n > 0; --n) {
        const std::int64_t value = next();
        const std::int64_t storage = next();
        const Bytes nbytes = next();
        if (value < 0) {
            throw Malformed{position_};
        }
        const auto at = static_cast<std::size_t>(value);
        if (known_.size() <= at) {
            known_.resize(std::max(at + 1, 2 * known_.size()));
        }
        // Negative bytes mean that the output is a view. Then `storage` is the number of a value in
        // the storage of its base.
        if (nbytes < 0) {
            const Known base = known(storage);
            known_[at] = {base.storage, &engine_.graph.views(call, *base.storage)};
        } else {
            PlainStorage& fresh = storages_.make(engine_.graph, storage, nbytes);
            made.emplace_back(&fresh);
            known_[at] = {Ref<Storage>(&fresh), &engine_.graph.makes(call, fresh)};
        }
    }
}

}  // namespace rekindle
