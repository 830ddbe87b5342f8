// Compares recomputed values with the first ones by checksum, for `rekindle.verify`.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "../torch/device.h"
#include "recipe.h"

namespace rekindle {

// Return the checksum of all bytes in `storage_impl`, on whatever device.
std::uint64_t checksum_of(const StoragePtr& storage_impl, Device& device);

// Reads every result once when it is made, and once each time it is recomputed.
class Audit final {
public:
    // A call whose result differed when it ran again.
    struct Difference final {
        const Facts* facts;
        OpId op;
    };

    // Note checksums of what `call` made on its first run. Its results are resident.
    void made(const Recipe& call, Device& device);
    // Compare the resident results of `call`, which was recomputed, with the first ones.
    void made_again(const Recipe& call, Device& device);

    // Forget the checksum of `storage`, which is about to be destroyed.
    void forget(const Storage& storage) noexcept { first_.erase(&storage); }

    const std::vector<Difference>& different() const noexcept { return different_; }

private:
    std::unordered_map<const Storage*, std::uint64_t> first_;  // checksums of the first results
    std::vector<Difference> different_;
};

}  // namespace rekindle
