// Follows a plan while the program agrees with it. It only gives advice to the engine, so a wrong
// plan costs time but never changes results. Twin of rekindle.engine._follower and ._route, which
// explain it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine.h"

namespace rekindle {

// A schedule in a form that is fast to follow. `moves[stops[i - 1]:stops[i]]` are the moves between
// the first runs of operators i - 1 and i. A negative move ~s says that storage s is not needed
// until it is restored. A move m >= 0 restores the storages `restored[restores[m]:restores[m + 1]]`
// with one operator.
struct Route final {
    std::vector<std::int64_t> stops;
    std::vector<std::int64_t> moves;
    std::vector<std::int64_t> restores;  // One entry more than there are groups.
    std::vector<std::int64_t> restored;
    // Storages to keep after they are dead, because the plan reuses them.
    std::vector<std::int64_t> kept;
};

// Owner of the memory, as a follower needs it.
class Host {
public:
    Host() = default;
    Host(const Host&) = delete;
    Host& operator=(const Host&) = delete;
    Host(Host&&) = delete;
    Host& operator=(Host&&) = delete;

    // Refresh which storages the program still holds, because the follower is about to restore
    // values and needs room.
    virtual void poll() = 0;
    // Return the storage that replaced `storage`, or `storage`.
    virtual Storage& current(Storage& storage) = 0;
    // Keep the memory of `storage` although the program drops it.
    virtual void own(Storage& storage) = 0;
    // Undo `own`.
    virtual void disown(Storage& storage) = 0;

protected:
    ~Host() = default;
};

// One run along `route`. The engine must be advised and must outlive the follower.
class Follower final {
public:
    Follower(Engine& engine, const Route& route, Host& host);
    Follower(const Follower&) = delete;
    Follower& operator=(const Follower&) = delete;
    Follower(Follower&&) = delete;
    Follower& operator=(Follower&&) = delete;
    ~Follower() = default;

    // Return the number of moves taken.
    std::int64_t position() const noexcept { return position_; }

    // The program made `storage`, which has `number` in the route.
    void made(std::int64_t number, Storage& storage);
    // Advance past all moves before `op` without making room for any of them.
    void skip(std::int64_t op);
    // Take the moves that come before the first run of `op`.
    void before(std::int64_t op);
    // The program needs `storage` before `op`. Takes moves until it is resident.
    void wanting(const Storage& storage, std::int64_t op);
    // Stop following: the route ended, or the program left it. The policy decides alone from now
    // on.
    void end();

private:
    // State of one storage number of the route.
    struct Stop final {
        Ref<Storage> storage;
        bool named = false;
        bool to_keep = false;
        bool kept = false;  // True if the follower holds a reference to it.
    };

    Stop& stop(std::int64_t number) { return stops_[static_cast<std::size_t>(number)]; }

    void name(std::int64_t number);
    void move();
    void mark(std::int64_t number);
    void unmark(std::int64_t move);
    void give_up(std::int64_t number);
    std::span<const std::int64_t> restored_by(std::int64_t move) const;
    bool fits(Storage& storage);

    Engine& engine_;
    const Route& route_;
    Host& host_;
    std::int64_t position_ = 0;
    std::vector<Stop> stops_;         // Indexed by storage number.
    std::vector<std::int64_t> kept_;  // Numbers that were kept, in that order.
};

}  // namespace rekindle
