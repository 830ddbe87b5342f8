// Compares recomputed values with the values of the first run by checksum, for `rekindle.verify`.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "../torch/device.h"
#include "recipe.h"

namespace rekindle {

// Return the checksum of all bytes in `storage_impl`, which may be on a CPU or a device.
std::uint64_t checksum_of(const StoragePtr& storage_impl, Device& device);

// Takes a checksum of every result when it is made, and again each time it is recomputed.
class Audit final {
public:
    // An operator call one of whose results differed after a recomputation.
    struct Difference final {
        const Facts* facts;
        OpId op;
    };

    // Record the checksums of the results of `call` after its first run. The results are resident.
    void made(const Recipe& call, Device& device);
    // Compare the results of `call`, which was recomputed, with the noted checksums. The results
    // are resident.
    void made_again(const Recipe& call, Device& device);

    // Forget the checksum of `storage`, which is about to be destroyed.
    void forget(const Storage& storage) noexcept { first_.erase(&storage); }

    const std::vector<Difference>& different() const noexcept { return different_; }

private:
    // checksums of the results of first runs
    std::unordered_map<const Storage*, std::uint64_t> first_;
    std::vector<Difference> different_;
};

}  // namespace rekindle
