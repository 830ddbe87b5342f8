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

// A plan in a form that is fast to follow: a list of steps, `moves`. The steps `moves[stops[i -
// 1]:stops[i]]` come between the first runs of operators i - 1 and i. With n = `n_restores()`:
//
// - A negative step ~s says that the program does not need storage s until the plan restores it.
// - A step m with 0 <= m < n restores the storages `restored[restores[m]:restores[m + 1]]` by
//   running one operator.
// - A step m >= n starts the copy `copies[m - n]` to or from the host.
struct Route final {
    std::vector<std::int64_t> stops;
    std::vector<std::int64_t> moves;
    // Storages to restore, in groups. `restores` has the bounds of the groups in `restored`, so it
    // has one entry more than there are groups.
    std::vector<std::int64_t> restores;
    std::vector<std::int64_t> restored;
    // Numbers of the storages that stay in memory when the program no longer holds them, because
    // the plan uses them again.
    std::vector<std::int64_t> kept;
    // Copies to the host and back: s copies storage s to the host, ~s swaps it in.
    std::vector<std::int64_t> copies;

    // Return the number of groups of storages to restore.
    std::int64_t n_restores() const noexcept {
        return static_cast<std::int64_t>(restores.size()) - 1;
    }

    // Return the copy to or from the host that the plan's step `move` starts, or null.
    const std::int64_t* copy_of(std::int64_t move) const noexcept {
        const std::int64_t index = move - n_restores();
        return index < 0 ? nullptr : &copies[static_cast<std::size_t>(index)];
    }
};

// Interface to the owner of the memory, such as the driver, as far as a follower uses it.
class Host {
public:
    Host() = default;
    Host(const Host&) = delete;
    Host& operator=(const Host&) = delete;

    // Update which storages the program still holds. Called before the follower restores values.
    virtual void poll() = 0;
    // Return the storage that replaced `storage` after an in-place write; `storage` itself if none
    // did.
    virtual Storage& current(Storage& storage) = 0;
    // Keep the memory of `storage` even if the program no longer holds it.
    virtual void own(Storage& storage) = 0;
    // Stop keeping the memory of `storage` (undo `own`).
    virtual void disown(Storage& storage) = 0;

protected:
    ~Host() = default;
};

// Follows the plan `route` once. The engine must accept marks of a plan (`advised`) and must
// outlive the follower.
class Follower final {
public:
    Follower(Engine& engine, const Route& route, Host& host);
    Follower(const Follower&) = delete;
    Follower& operator=(const Follower&) = delete;
    ~Follower() = default;

    // Return the number of steps of the plan (evictions and restores) performed so far.
    std::int64_t position() const noexcept { return position_; }

    // Record that the program made `storage`, which has the number `number` in the plan.
    void made(std::int64_t number, Storage& storage);
    // Advance past the plan's steps that come before the first run of `op`, without restoring any
    // storage.
    void skip(std::int64_t op);
    // Perform the plan's evictions and restores that come before the first run of `op`.
    void before(std::int64_t op);
    // The program needs the evicted `storage` before `op`. Perform the plan's evictions and
    // restores until `storage` is in memory.
    void about_to_access(const Storage& storage, std::int64_t op);
    // Stop following the plan: it ended, or the program ran another operator than planned. From now
    // on the policy decides alone.
    void end();

private:
    // State of one storage that the plan mentions.
    struct Stop final {
        Ref<Storage> storage;
        bool named = false;
        bool to_keep = false;
        bool kept = false;  // The follower holds a reference to the storage.
    };

    Stop& stop(std::int64_t number) { return stops_[static_cast<std::size_t>(number)]; }

    void name(std::int64_t number);
    void move();
    void save(std::int64_t number);
    void fetch_late();
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
    // Numbers of the storages whose swap-in is due but did not fit yet, in the plan's order.
    std::vector<std::int64_t> late_;
};

}  // namespace rekindle
