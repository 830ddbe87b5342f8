// Compares recomputed values with the values of the first run by checksum. `rekindle.verify` uses
// this to prove that recomputation gives the same bits.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "../../torch/device.h"
#include "../records/recipe.h"

namespace rekindle {

// Return the checksum of all bytes in `storage_impl`, which may be on a CPU or a device.
std::uint64_t checksum_of(const StoragePtr& storage_impl, Device& device);

// Takes a checksum of every operator result when the operator first runs, and again at each
// recomputation of the result.
class Audit final {
public:
    // An operator call one of whose results differed after a recomputation.
    struct Difference final {
        const Facts* facts;
        OpId op;
    };

    // Store the checksums of the results of the operator call `call` after its first run.
    void made(const Recipe& call, Device& device);
    // Compare the results of the operator call `call`, which was just recomputed, with the
    // checksums of its first run.
    void made_again(const Recipe& call, Device& device);

    // Forget the checksum of `storage`, which is about to be destroyed.
    void forget(const Storage& storage) noexcept { first_.erase(&storage); }

    const std::vector<Difference>& different() const noexcept { return different_; }

private:
    // checksum of each storage after the first run of its operator
    std::unordered_map<const Storage*, std::uint64_t> first_;
    std::vector<Difference> different_;
};

}  // namespace rekindle
