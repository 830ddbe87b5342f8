// The memory of a device that no operator reported.
#pragma once

#include <algorithm>

#include "../../base/ref.h"
#include "../../base/types.h"
#include "../../engine/engine.h"
#include "../../torch/device.h"

namespace rekindle {

// A pseudo storage in the engine, so that the budget counts all device memory. Its bytes are those
// that the device's allocator gave out in addition to known storages: no operator reported them, or
// the allocator rounded sizes up. On a CPU there is none. The caller holds the session mutex.
class OutsideMemory final {
public:
    OutsideMemory(Engine& engine, const Device& device) : engine_(engine), device_(device) {}

    // Count outside memory in the pseudo storage `storage` from now on.
    void count_in(Storage& storage) { storage_ = Ref<Storage>(&storage); }

    Bytes nbytes() const noexcept { return storage_ ? storage_->nbytes : 0; }

    // `nbytes` of outside memory count as a known storage from now on.
    void subtract(Bytes nbytes) {
        if (storage_) {
            engine_.resize(*storage_, std::max<Bytes>(0, storage_->nbytes - nbytes));
        }
    }

    // Ask the device's allocator how much it gave out. Return false if it has given out fewer bytes
    // than the engine counts, so some counted storages were freed. Memory that another stream may
    // still read (`record_stream`) stays allocated until that stream is done.
    bool ask_allocator() {
        if (!storage_) {
            return true;
        }
        const Bytes known = engine_.memory - storage_->nbytes;
        const Bytes beside = device_.allocated() - known;
        engine_.resize(*storage_, std::max<Bytes>(0, beside));
        return beside >= 0;
    }

private:
    Engine& engine_;
    const Device& device_;
    Ref<Storage> storage_;
};

}  // namespace rekindle
