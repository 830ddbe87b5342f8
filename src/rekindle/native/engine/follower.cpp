#include "follower.h"

#include <algorithm>

namespace rekindle {

namespace {

// Return true if the plan should swap `storage` in: something refers to it, and its value exists on
// the host only.
bool is_host_only(const Storage& storage) noexcept {
    return !storage.dissolved && storage.on_host && !storage.resident;
}

}  // namespace

Follower::Follower(Engine& engine, const Route& route, Host& host)
    : engine_(engine), route_(route), host_(host) {
    engine_.listen();
    engine_.follow_plan(true);
    for (const std::int64_t number : route.restored) {
        name(number);
    }
    for (const std::int64_t number : route.copies) {
        name(std::max(number, ~number));
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

// Record that the plan mentions the storage with the number `number`.
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
    fetch_late();
}

void Follower::about_to_access(const Storage& storage, std::int64_t op) {
    const std::int64_t end = route_.stops[static_cast<std::size_t>(op)];
    while (position_ < end && !storage.resident) {
        move();
    }
}

void Follower::end() {
    engine_.clear_marks();
    engine_.follow_plan(false);
    late_.clear();
    for (const std::int64_t number : kept_) {
        give_up(number);
    }
    kept_.clear();
    for (Stop& place : stops_) {
        place.storage = Ref<Storage>();
    }
}

// Return the numbers of the storages that the step `move` of the plan restores.
std::span<const std::int64_t> Follower::restored_by(std::int64_t move) const {
    const auto at = static_cast<std::size_t>(move);
    const auto first = static_cast<std::size_t>(route_.restores[at]);
    const auto last = static_cast<std::size_t>(route_.restores[at + 1]);
    return std::span(route_.restored).subspan(first, last - first);
}

// Perform the next step of the plan: mark a storage as not needed for now, start a copy to or from
// the host, or recompute a group of storages.
void Follower::move() {
    const std::int64_t move = route_.moves[static_cast<std::size_t>(position_++)];
    if (move < 0) {
        mark(~move);
        return;
    }
    if (const std::int64_t* copy = route_.copy_of(move); copy != nullptr && *copy >= 0) {
        save(*copy);
        return;
    }
    unmark(move);
    if (const std::int64_t* copy = route_.copy_of(move); copy != nullptr) {
        const Ref<Storage> storage = stop(~*copy).storage;
        if (storage && is_host_only(*storage)) {
            late_.push_back(~*copy);
        } else if (storage && !storage->resident && fits(*storage)) {
            engine_.require(storage->root);  // The copy to the host was not made, or failed.
        }
        fetch_late();
        return;
    }
    for (const std::int64_t number : restored_by(move)) {
        const Ref<Storage> storage = stop(number).storage;
        if (storage && !storage->resident && fits(*storage)) {
            engine_.require(storage->root);
        }
    }
}

// Start to copy the storage that has the number `number` in the plan to the host.
void Follower::save(std::int64_t number) {
    const Ref<Storage> storage = stop(number).storage;
    if (storage && !storage->dissolved) {
        engine_.save(*storage);
    }
}

// Swap in the storages whose swap-in is due by the plan, in their order, up to the first that does
// not fit.
void Follower::fetch_late() {
    std::size_t done = 0;
    for (; done < late_.size(); ++done) {
        const Ref<Storage> storage = stop(late_[done]).storage;
        if (!storage || !is_host_only(*storage)) {
            continue;
        }
        if (!fits(*storage)) {
            break;
        }
        engine_.fetch(*storage);
    }
    late_.erase(late_.begin(), late_.begin() + static_cast<std::ptrdiff_t>(done));
}

void Follower::mark(std::int64_t number) {
    if (const Ref<Storage> storage = stop(number).storage; storage) {
        engine_.mark(*storage);
        // If the plan contains copies to the host, evict the storage at once. Memory of a
        // swapped-out storage is freed only when its copy ends. Until then the plan assumes that
        // the memory of all storages that it evicted without a copy is free.
        if (!route_.copies.empty()) {
            engine_.evict_these(std::span(&storage, 1));
        }
    }
    give_up(number);
}

void Follower::unmark(std::int64_t move) {
    if (const std::int64_t* copy = route_.copy_of(move); copy != nullptr) {
        if (*copy < 0 && stop(~*copy).storage) {
            engine_.unmark(*stop(~*copy).storage);
        }
        return;
    }
    for (const std::int64_t number : restored_by(move)) {
        if (stop(number).storage) {
            engine_.unmark(*stop(number).storage);
        }
    }
}

// Release the follower's reference to the storage that has the number `number` in the plan, if the
// follower has one.
void Follower::give_up(std::int64_t number) {
    Stop& place = stop(number);
    if (place.kept) {
        place.kept = false;
        const Ref<Storage> storage(&host_.current(*place.storage));
        engine_.release(*storage);
        host_.disown(*storage);
    }
}

// Return true if `storage` can be restored now without evicting anything that the plan still needs.
bool Follower::fits(Storage& storage) {
    if (storage.dissolved || !storage.restorable()) {
        return false;
    }
    const Call& call = *storage.root.call;
    const std::span<const Edge> inputs =
        storage.on_host ? std::span<const Edge>() : std::span<const Edge>(call.inputs());
    for (const Edge& edge : inputs) {
        if (!edge.value->defined || edge.value->storage->absent) {
            return false;
        }
    }
    if (engine_.budget == UNLIMITED) {
        return true;
    }
    const Bytes needed =
        storage.on_host ? storage.nbytes : call.nbytes + engine_.workspace_of(call);
    const Bytes most = engine_.budget - engine_.in_flight - needed;
    Bytes over = engine_.memory - most;
    if (over > 0) {
        host_.poll();
        over = engine_.memory - most;
    }
    return over <= 0 || over <= engine_.spare_beside(inputs);
}

}  // namespace rekindle
