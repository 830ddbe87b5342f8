// Interface through which the engine acts. The driver implements it. The Python engine yields its
// actions; this one calls them. Each action is performed before the next is decided.
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

    // Run `call`, for the first time or again. If `in_place`, storages that it overwrites lend it
    // their memory. An error must leave no trace. The exception is a storage that was to be
    // overwritten: the performer first calls `spoil` for it. Other threads may act meanwhile,
    // within an `Engine::Interlude`.
    virtual void compute(Call& call, bool in_place) = 0;

    // Free the memory of `storage`, which may be freed already or out of the graph. Must not call
    // the engine.
    virtual void free(Storage& storage) = 0;

    // Begin to copy `storage` to the host, and free its memory unless `keep`. Return true on
    // success.
    virtual bool swap_out(Storage& storage, bool keep) = 0;

    // Restore `storage` from its copy, or report the failure to the engine.
    virtual void swap_in(Storage& storage) = 0;

    // Discard the copy of `storage`. Must not call the engine.
    virtual void discard(Storage& storage) = 0;

    // Return the bytes that `call` needs in addition to its outputs while it runs.
    virtual Bytes workspace(const Call& call) const noexcept = 0;

    // Destroy an unreferenced object. Called at the end of an event, never during one.
    virtual void dispose(Storage& storage) noexcept = 0;
    virtual void dispose(Call& call) noexcept = 0;

protected:
    ~Performer() = default;
};

}  // namespace rekindle
