// Counts of the values that were moved to the host and back, by kind, for the report of a run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "../../base/types.h"
#include "../records/storage_record.h"

namespace rekindle {

// How often values of one kind were copied out to the host and back in, and their bytes.
struct MovedKind final {
    std::int64_t times_out = 0;
    Bytes out = 0;
    std::int64_t times_in = 0;
    Bytes in = 0;
};

// The counts of one budget. The caller holds the session mutex.
class Moved final {
public:
    // Kinds, in the order of `all`: values that can be recomputed, parameters, gradients, optimizer
    // state, others.
    static constexpr std::size_t KINDS = 5;

    void went_out(const StorageRecord& record) noexcept {
        MovedKind& kind = kinds_[kind_of(record)];
        ++kind.times_out;
        kind.out += record.nbytes;
    }

    void came_in(const StorageRecord& record) noexcept {
        MovedKind& kind = kinds_[kind_of(record)];
        ++kind.times_in;
        kind.in += record.nbytes;
    }

    const std::array<MovedKind, KINDS>& all() const noexcept { return kinds_; }

private:
    static std::size_t kind_of(const StorageRecord& record) noexcept {
        if (record.replayable) {
            return 0;
        }
        if (record.parameter) {
            return 1;
        }
        return record.role == Role::unknown ? KINDS - 1 : static_cast<std::size_t>(record.role);
    }

    std::array<MovedKind, KINDS> kinds_{};
};

}  // namespace rekindle
