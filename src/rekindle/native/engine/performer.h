// Who does what the engine decides: the driver. The Python engine yields its actions, this one
// calls these; each is performed before the next is decided.
#pragma once

#include "../base/types.h"

namespace rekindle {

struct Call;
struct Storage;

class Performer {
public:
    Performer() = default;
    Performer(const Performer&) = delete;
    Performer& operator=(const Performer&) = delete;
    Performer(Performer&&) = delete;
    Performer& operator=(Performer&&) = delete;

    // Runs `call`: the first time for an engine that calls, again for one that admits. With
    // `in_place` the storages that it overwrites lend their memory. May throw: then nothing has
    // happened, but for a storage that was to be overwritten (tell the engine by `spoil`, first).
    // Other threads may come meanwhile, within an `Engine::Interlude`.
    virtual void compute(Call& call, bool in_place) = 0;

    // The memory of `storage` goes. It may be gone already, and no longer be in the graph. Asks
    // nothing of the engine.
    virtual void free(Storage& storage) = 0;

    // Begins to copy `storage` to the host; its memory goes, unless it is to `keep` it. Returns
    // whether it did.
    virtual bool swap_out(Storage& storage, bool keep) = 0;

    // Brings `storage` back from its copy, or tells the engine that this failed.
    virtual void swap_in(Storage& storage) = 0;

    // Nobody needs the copy of `storage` any more. Asks nothing of the engine.
    virtual void discard(Storage& storage) = 0;

    // What `call`, which has a workspace, takes beside its outputs while it runs, and gives back.
    virtual Bytes workspace(const Call& call) const noexcept = 0;

    // Nobody refers to it any more: destroy it. Not during an event but at its end.
    virtual void dispose(Storage& storage) noexcept = 0;
    virtual void dispose(Call& call) noexcept = 0;

protected:
    ~Performer() = default;
};

}  // namespace rekindle
