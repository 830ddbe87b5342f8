// Follows a plan of evictions and recomputations while the program runs the planned operators. The
// follower only gives advice to the engine, so a wrong plan costs time but never changes results.
// Twin of rekindle.engine._follower and ._route, which explain plans.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine.h"

namespace rekindle {

// A plan in a form that is fast to follow. `moves[stops[i - 1]:stops[i]]` are the moves between the
// first runs of operators i - 1 and i. A negative move ~s says that storage s is not needed until
// the plan restores it. A move m >= 0 restores the storages `restored[restores[m]:restores[m + 1]]`
// with one operator.
struct Route final {
    std::vector<std::int64_t> stops;
    std::vector<std::int64_t> moves;
    // Bounds of the groups in `restored`: one entry more than there are groups.
    std::vector<std::int64_t> restores;
    std::vector<std::int64_t> restored;
    // Numbers of the storages that the follower keeps alive after the program drops them, because
    // the plan reuses them.
    std::vector<std::int64_t> kept;
};

// Interface of the owner of the memory, as far as a follower uses it.
class Host {
public:
    Host() = default;
    Host(const Host&) = delete;
    Host& operator=(const Host&) = delete;
    Host(Host&&) = delete;
    Host& operator=(Host&&) = delete;

    // Update which storages the program still holds. Called when the follower is about to restore
    // values and needs room.
    virtual void poll() = 0;
    // Return the storage that replaced `storage`; `storage` itself if none did.
    virtual Storage& current(Storage& storage) = 0;
    // Keep the memory of `storage` after the program drops it.
    virtual void own(Storage& storage) = 0;
    // Stop keeping the memory of `storage` (undo `own`).
    virtual void disown(Storage& storage) = 0;

protected:
    ~Host() = default;
};

// Follows one plan, `route`, once. The engine must be advised and must outlive the follower.
class Follower final {
public:
    Follower(Engine& engine, const Route& route, Host& host);
    Follower(const Follower&) = delete;
    Follower& operator=(const Follower&) = delete;
    Follower(Follower&&) = delete;
    Follower& operator=(Follower&&) = delete;
    ~Follower() = default;

    // Return the number of moves of the plan taken so far.
    std::int64_t position() const noexcept { return position_; }

    // The program made `storage`, whose number in the plan is `number`.
    void made(std::int64_t number, Storage& storage);
    // Take the moves before the first run of `op`, but without restoring any storage.
    void skip(std::int64_t op);
    // Take the moves of the plan that come before the first run of `op`.
    void before(std::int64_t op);
    // The program needs `storage` before `op`. Takes moves of the plan until `storage` is resident.
    void wanting(const Storage& storage, std::int64_t op);
    // Stop following: the plan ended, or the program ran another operator than planned. From now on
    // the policy decides alone.
    void end();

private:
    // State of one storage that the plan mentions.
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
    std::vector<Stop> stops_;  // The storages of the plan, by number.
    // Numbers of the storages kept so far, in the order in which they were made.
    std::vector<std::int64_t> kept_;
};

}  // namespace rekindle
