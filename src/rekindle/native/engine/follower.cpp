#include "follower.h"

#include <algorithm>

namespace rekindle {

Follower::Follower(Engine& engine, const Route& route, Host& host)
    : engine_(engine), route_(route), host_(host) {
    engine_.listen();
    for (const std::int64_t number : route.restored) {
        name(number);
    }
    for (const std::int64_t move : route.moves) {
        if (move < 0) {
            name(~move);
        }
    }
    for (const std::int64_t number : route.kept) {
        name(number);
        stop(number).to_keep = true;
    }
}

// Record that the plan mentions the storage `number`.
void Follower::name(std::int64_t number) {
    const std::size_t needed = static_cast<std::size_t>(number) + 1;
    if (stops_.size() < needed) {
        stops_.resize(std::max(needed, 2 * stops_.size()));
    }
    stop(number).named = true;
}

void Follower::made(std::int64_t number, Storage& storage) {
    if (static_cast<std::size_t>(number) >= stops_.size() || !stop(number).named) {
        return;
    }
    Stop& place = stop(number);
    place.storage = Ref<Storage>(&storage);
    if (place.to_keep && storage.replayable) {
        engine_.retain(storage);
        host_.own(storage);
        place.kept = true;
        kept_.push_back(number);
    }
}

void Follower::skip(std::int64_t op) {
    const std::int64_t end = route_.stops[static_cast<std::size_t>(op)];
    while (position_ < end) {
        const std::int64_t move = route_.moves[static_cast<std::size_t>(position_++)];
        if (move < 0) {
            mark(~move);
        } else {
            unmark(move);
        }
    }
}

void Follower::before(std::int64_t op) {
    const std::int64_t end = route_.stops[static_cast<std::size_t>(op)];
    while (position_ < end) {
        move();
    }
}

void Follower::wanting(const Storage& storage, std::int64_t op) {
    const std::int64_t end = route_.stops[static_cast<std::size_t>(op)];
    while (position_ < end && !storage.resident) {
        move();
    }
}

void Follower::end() {
    engine_.clear_marks();
    for (const std::int64_t number : kept_) {
        give_up(number);
    }
    kept_.clear();
    for (Stop& place : stops_) {
        place.storage = Ref<Storage>();
    }
}

std::span<const std::int64_t> Follower::restored_by(std::int64_t move) const {
    const auto at = static_cast<std::size_t>(move);
    const auto first = static_cast<std::size_t>(route_.restores[at]);
    const auto last = static_cast<std::size_t>(route_.restores[at + 1]);
    return std::span(route_.restored).subspan(first, last - first);
}

// Take the next move of the plan: mark a storage as not needed for now, or restore the storages of
// a group that fit.
void Follower::move() {
    const std::int64_t move = route_.moves[static_cast<std::size_t>(position_++)];
    if (move < 0) {
        mark(~move);
        return;
    }
    unmark(move);
    for (const std::int64_t number : restored_by(move)) {
        const Ref<Storage> storage = stop(number).storage;
        if (storage && !storage->resident && fits(*storage)) {
            engine_.require(storage->root);
        }
    }
}

void Follower::mark(std::int64_t number) {
    if (stop(number).storage) {
        engine_.mark(*stop(number).storage);
    }
    give_up(number);
}

void Follower::unmark(std::int64_t move) {
    for (const std::int64_t number : restored_by(move)) {
        if (stop(number).storage) {
            engine_.unmark(*stop(number).storage);
        }
    }
}

// Release the follower's reference to the storage `number`, if it has one.
void Follower::give_up(std::int64_t number) {
    Stop& place = stop(number);
    if (place.kept) {
        place.kept = false;
        const Ref<Storage> storage(&host_.current(*place.storage));
        engine_.release(*storage);
        host_.disown(*storage);
    }
}

// Return true if `storage` can be recomputed right now without evicting anything that the plan
// still needs.
bool Follower::fits(Storage& storage) {
    if (storage.dissolved || !storage.replayable) {
        return false;
    }
    const Call& call = *storage.root.call;
    for (const Edge& edge : call.inputs()) {
        if (!edge.value->defined) {
            return false;
        }
    }
    if (engine_.budget == UNLIMITED) {
        return true;
    }
    const Bytes needed = call.nbytes + engine_.workspace_of(call);
    const Bytes most = engine_.budget - engine_.in_flight - needed;
    Bytes over = engine_.memory - most;
    if (over > 0) {
        host_.poll();
        over = engine_.memory - most;
    }
    return over <= 0 || over <= engine_.spare_beside(call.inputs());
}

}  // namespace rekindle
