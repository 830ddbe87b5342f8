// A short summary of the bytes of a storage, to find out later if they have changed.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

#include "storage_ptr.h"

namespace rekindle {

// Summary of a storage's bytes. On the CPU it is a checksum. On a device it is the sums of rows and
// columns of the bytes, seen as a table of 64-bit numbers, and the bytes that fill no row. The
// device computes them without a synchronization; they take about 1/512 of the storage.
struct Fingerprint final {
    std::uint64_t checksum = 0;
    std::array<at::Tensor, 3> on_device;
};

Fingerprint fingerprint_of(const StoragePtr& storage_impl);
// Return true if two fingerprints, of storages with the same size on the same device, are equal.
// Waits for the device.
bool is_same(const Fingerprint& one, const Fingerprint& other);

}  // namespace rekindle
