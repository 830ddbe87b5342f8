// Which storages count against a budget, by the device of their memory.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <vector>

#include "../../base/types.h"
#include "../../ops/errors.h"
#include "../../torch/device.h"

namespace rekindle {

// The device whose memory a budget limits, and the devices that the program has used. The caller
// holds the session mutex.
class CountedDevices final {
public:
    // If `assumed`, the user did not name `device`, and a program that uses another device gets an
    // error.
    CountedDevices(const Device& device, bool assumed) : device_(device), assumed_(assumed) {}

    // Return true if `storage_impl` is on the device whose memory the budget limits.
    bool counts(const c10::StorageImpl& storage_impl) {
        const c10::Device there = storage_impl.device();
        const c10::Device here = device_.which();
        const bool same = there.is_cpu() ? here.is_cpu() : there == here;
        if (used_.empty() || used_.front() != there) {
            if (std::ranges::find(used_, there) == used_.end()) {
                used_.push_back(there);
            }
            if (assumed_ && !same && !there.is_cpu()) {
                throw WrongDeviceError(there);
            }
        }
        return same;
    }

    // Return the bytes of `storage_impl`, rounded up as the allocator does, or 0 if the storage is
    // not on the device whose memory the budget limits.
    Bytes counted(const c10::StorageImpl& storage_impl) {
        return counts(storage_impl) ? device_.rounded(static_cast<Bytes>(storage_impl.nbytes()))
                                    : 0;
    }

    // Return the devices whose memory the program has used so far.
    const std::vector<c10::Device>& used() const noexcept { return used_; }

private:
    const Device& device_;
    std::vector<c10::Device> used_;
    bool assumed_;  // the user did not name the device, so that it was assumed
};

}  // namespace rekindle
