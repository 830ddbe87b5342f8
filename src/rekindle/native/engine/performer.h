// Interface through which the engine acts: it runs calls and frees or copies memory. The driver
// implements it. The Python engine yields its actions; this one calls them. Each action is
// performed before the engine decides the next.
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

    // Run `call`, for the first time or to recompute its outputs. If `in_place`, the outputs use
    // the memory of the storages that the call overwrites. After an exception nothing may have
    // changed, except that an overwritten storage may have lost its contents. For such a storage
    // the performer first calls `spoil`. Other threads may act during the run, within an
    // `Engine::Interlude`.
    virtual void compute(Call& call, bool in_place) = 0;

    // Free the memory of `storage`. The program may have freed it already, and the storage may have
    // left the graph. Must not call the engine.
    virtual void free(Storage& storage) = 0;

    // Begin to copy `storage` to the host, and free its memory afterwards unless `keep`. Return
    // true on success.
    virtual bool swap_out(Storage& storage, bool keep) = 0;

    // Restore `storage` from its host copy. On failure, report it to the engine
    // (`Engine::swap_in_failed`), or throw if the storage cannot be recomputed. `early`: nothing
    // reads the value yet, so that the performer need not wait for the transfer.
    virtual void swap_in(Storage& storage, bool early) = 0;

    // Return true if the host copy of the resident `storage`, which has no recipe, has old
    // contents: the program wrote the storage, and nobody has told the engine (`Ledger::written`).
    // Must not call the engine.
    virtual bool is_copy_outdated(Storage& storage) = 0;

    // Discard the host copy of `storage`. Must not call the engine.
    virtual void discard(Storage& storage) = 0;

    // Return the bytes that `call` needs in addition to its outputs while it runs.
    virtual Bytes workspace(const Call& call) const noexcept = 0;

    // Destroy an object to which nothing refers any more. Called at the end of an event, never
    // during one.
    virtual void dispose(Storage& storage) noexcept = 0;
    virtual void dispose(Call& call) noexcept = 0;

protected:
    ~Performer() = default;
};

}  // namespace rekindle
