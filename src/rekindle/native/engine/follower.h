// Follows a route while the program agrees with it, by advice to the engine and nothing else. Twin
// of rekindle.engine._follower and ._route, where it is explained.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine.h"

namespace rekindle {

// A schedule, made ready to be followed: `moves[stops[i - 1]:stops[i]]` comes between the first
// runs of operators i - 1 and i. A move is ~s where storage s is not needed until it is brought
// back, or the number of the storages that are to be brought back by one operator: those are
// `restored[restores[move]:restores[move + 1]]`.
struct Route final {
    std::vector<std::int64_t> stops;
    std::vector<std::int64_t> moves;
    std::vector<std::int64_t> restores;  // one more than there are such numbers
    std::vector<std::int64_t> restored;
    std::vector<std::int64_t> kept;  // not let go when it is dead
};

// What a follower asks of whoever owns the memory.
class Host {
public:
    Host() = default;
    Host(const Host&) = delete;
    Host& operator=(const Host&) = delete;
    Host(Host&&) = delete;
    Host& operator=(Host&&) = delete;

    // Something is to be brought back: the program may have dropped what can be let go.
    virtual void poll() = 0;
    // Where references to `storage` went, if something took its place.
    virtual Storage& current(Storage& storage) = 0;
    // The memory of `storage` stays although the program drops it.
    virtual void own(Storage& storage) = 0;
    // And now it need not, unless others refer to it.
    virtual void disown(Storage& storage) = 0;

protected:
    ~Host() = default;
};

// One run along `route`. The engine must be advised, and outlive it.
class Follower final {
public:
    Follower(Engine& engine, const Route& route, Host& host);
    Follower(const Follower&) = delete;
    Follower& operator=(const Follower&) = delete;
    Follower(Follower&&) = delete;
    Follower& operator=(Follower&&) = delete;
    ~Follower() = default;

    // Moves taken so far.
    std::int64_t position() const noexcept { return position_; }

    // The program made `storage`, which is `number` on the route.
    void made(std::int64_t number, Storage& storage);
    // As if all moves before `op` had been taken, and room been made for none of them.
    void skip(std::int64_t op);
    // Takes the moves that come before the first run of `op`.
    void before(std::int64_t op);
    // The program asks for `storage` before `op`: takes the moves until it is there.
    void wanting(const Storage& storage, std::int64_t op);
    // The route ends, or the program left it: the policy decides alone from now on.
    void end();

private:
    // What the route says of one number, and the storage that has it.
    struct Stop final {
        Ref<Storage> storage;
        bool named = false;
        bool to_keep = false;
        bool kept = false;  // one reference to it is ours
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
    std::vector<Stop> stops_;         // by number
    std::vector<std::int64_t> kept_;  // numbers that were kept, in that order
};

}  // namespace rekindle
