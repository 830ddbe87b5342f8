// Storages that the program resizes.
#pragma once

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <vector>

#include "sources.h"

namespace rekindle {

// The resizes of one budget. The caller holds the session mutex.
class Resizes final {
public:
    Resizes(Frees& frees, Room& room, Storages& storages, Sources& sources)
        : engine_(frees.engine),
          registry_(frees.registry),
          events_(frees.events),
          frees_(frees),
          room_(room),
          storages_(storages),
          sources_(sources) {}

    Resizes(const Resizes&) = delete;
    Resizes& operator=(const Resizes&) = delete;
    ~Resizes() = default;

    // Prepare for a resize of `storage_impl` to `nbytes`. newest: sequence number of an autograd
    // node, as for `leave` in gathered.h; negative if the program will not restore the contents.
    // Return true if `storage_impl` has a record.
    bool about_to_resize(c10::StorageImpl& storage_impl, Bytes nbytes, std::int64_t newest);
    // Finish the resize that `about_to_resize` announced.
    void has_been_resized();

private:
    StorageRecord* emptied_at(const c10::StorageImpl& storage_impl);

    Engine& engine_;
    Registry& registry_;
    Events& events_;
    Frees& frees_;
    Room& room_;
    Storages& storages_;
    Sources& sources_;
    Ref<Storage> resizing_;              // storage that the program is resizing now
    std::vector<Ref<Storage>> emptied_;  // storages that the program resized to zero bytes
};

}  // namespace rekindle
