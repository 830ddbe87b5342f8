#include "host_memory.h"

#include <algorithm>
#include <tuple>

namespace rekindle {

namespace {

// Largest fraction of a swap-in that is assumed to overlap with computation. A host copy ahead of
// an eviction is made only if it pays under this assumption.
constexpr double MOST_HIDDEN = 0.9;

// Estimated duration of a backward pass relative to its forward pass: it computes two matrix
// products for each one of the forward pass.
constexpr Nanoseconds BACKWARD = 2;

}  // namespace

bool Moves::take(const Storage& storage) noexcept {
    return std::erase_if(moves_, [&](const Move& move) { return move.first == &storage; }) != 0;
}

bool Moves::has(const Storage& storage) const noexcept {
    return std::ranges::any_of(moves_, [&](const Move& move) { return move.first == &storage; });
}

void HostMemory::take(Storage& storage) {
    copies.push_back(&storage);
    storage.on_host = true;
    nbytes += storage.nbytes;
    peak = std::max(peak, nbytes);
    swapped_out += storage.nbytes;
}

void HostMemory::drop(Storage& storage) noexcept {
    storage.on_host = false;
    std::erase(copies, &storage);
    nbytes -= storage.nbytes;
}

void HostMemory::failed(Storage& storage) noexcept {
    drop(storage);
    swapped_out -= storage.nbytes;
    limit = nbytes;
}

bool HostMemory::refuses(const Storage& storage) const noexcept {
    return std::ranges::find(refused, &storage) != refused.end();
}

void HostMemory::spare(Bytes more, std::vector<Storage*>& found) const {
    Bytes lacking = lacks(more);
    for (Storage* storage : copies) {
        if (lacking <= 0) {
            break;
        }
        if (storage->resident && !saving.has(*storage)) {
            found.push_back(storage);
            lacking -= storage->nbytes;
        }
    }
    if (lacking > 0) {
        found.clear();
    }
}

Storage* HostMemory::next_back(Nanoseconds now, bool sources) const noexcept {
    const auto used = [](const Storage& storage) {
        return std::tuple(storage.last_access, storage.id);
    };
    Storage* found = nullptr;
    for (Storage* storage : copies) {
        if (storage->resident || storage->dead() || !(sources || storage->replayable)) {
            continue;
        }
        const Nanoseconds wanted = turn + BACKWARD * (turn - storage->last_access);
        const bool late = wanted < now + link.in_ns(storage->nbytes);
        if (late && storage->replayable && !only) {
            continue;
        }
        if (found == nullptr || used(*storage) > used(*found)) {
            found = storage;
        }
    }
    return found;
}

Storage* HostMemory::next_used() const noexcept {
    Storage* found = nullptr;
    std::int64_t least = StepOrder::NEVER;
    for (Storage* storage : copies) {
        if (storage->resident || storage->dead() || storage->replayable) {
            continue;
        }
        if (const auto distance = order.distance(*storage); distance && *distance < least) {
            found = storage;
            least = *distance;
        }
    }
    return found;
}

Nanoseconds HostMemory::cost(Storage& storage) const noexcept {
    const Nanoseconds back = link.in_ns(storage.nbytes);
    if (!storage.on_host) {
        return back + link.out_ns(storage.nbytes);
    }
    return storage.replayable ? std::min(back, recipe_ns(storage)) : back;
}

bool HostMemory::worth_copying(const Storage& storage, Nanoseconds now) const noexcept {
    const Nanoseconds unused = now - storage.last_access;
    // once the order of sources is known, they are copied when they leave
    if (storage.on_host || (!storage.replayable && order.known()) ||
        unused < link.out_ns(storage.nbytes)) {
        return false;
    }
    const auto back = static_cast<double>(link.in_ns(storage.nbytes));
    return only || !storage.replayable ||
           back * (1 - MOST_HIDDEN) <= static_cast<double>(storage.cost);
}

Nanoseconds HostMemory::waiting(const Storage& storage, Nanoseconds now) const noexcept {
    Bytes before = 0;
    for (const Storage* other : copies) {
        if (!other->resident && other->last_access > storage.last_access) {
            before += other->nbytes;
        }
    }
    return link.waiting_in(storage.nbytes, before, now - storage.last_access) +
           link.waiting_out(storage.nbytes, now);
}

}  // namespace rekindle
