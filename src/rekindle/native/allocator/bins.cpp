#include "bins.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <mutex>
#include <utility>

namespace rekindle {

namespace {

constexpr std::size_t GRAIN = 64;  // PyTorch's alignment in bytes.
// Number of piece sizes that are multiples of `GRAIN`. Larger sizes grow by an eighth of a power of
// two.
constexpr std::size_t FINE = 8;

// Divide the address space into parts of `length` bytes, and return the start of the part that has
// `address`. If `before`, return the start of the part before that one.
const void* part_of(const void* address, std::size_t length, bool before = false) noexcept {
    const auto beyond = reinterpret_cast<std::uintptr_t>(address) % length;
    return static_cast<const char*>(address) - beyond - (before ? length : 0);
}

}  // namespace

void* Bins::take(std::size_t nbytes) {
    const std::size_t kind = kind_of(nbytes);
    {
        const std::scoped_lock guard(lock_);
        if (!open_[kind].empty()) {
            return take_from(open_[kind].begin());
        }
    }
    List made(1);
    Slab& slab = made.front();
    slab.piece = size_of(kind);
    slab.kind = kind;
    slab.address = static_cast<char*>(blocks_.take(SLAB, 0));
    if (slab.address == nullptr) {
        return nullptr;
    }
    const std::scoped_lock guard(lock_);
    by_part_.put(part_of(slab.address, SLAB), made.begin());
    open_[kind].splice(open_[kind].begin(), made);
    return take_from(open_[kind].begin());
}

bool Bins::give(void* address) {
    List empty;
    {
        const std::scoped_lock guard(lock_);
        const auto* found = slab_of(address);
        if (found == nullptr) {
            return false;
        }
        const auto slab = *found;
        List& open = open_[slab->kind];
        if (slab->live == slab->pieces()) {
            open.splice(open.end(), full_, slab);
        }
        *static_cast<void**>(address) = std::exchange(slab->freed, address);
        blocks_.note_asked(-static_cast<Bytes>(slab->piece));
        --slab->live;
        if (slab->live != 0 || (keeps_spares_ && open.size() == 1)) {
            return true;
        }
        by_part_.take(part_of(slab->address, SLAB));
        empty.splice(empty.end(), open, slab);
    }
    blocks_.give(empty.front().address);
    return true;
}

bool Bins::has(const void* address) noexcept {
    const std::scoped_lock guard(lock_);
    return slab_of(address) != nullptr;
}

void Bins::keep_spares(bool keeps) {
    List empty;
    {
        const std::scoped_lock guard(lock_);
        keeps_spares_ = keeps;
        for (List& open : open_) {
            for (auto each = open.begin(); !keeps && each != open.end();) {
                const auto slab = each++;
                if (slab->live == 0) {
                    by_part_.take(part_of(slab->address, SLAB));
                    empty.splice(empty.end(), open, slab);
                }
            }
        }
    }
    for (const Slab& each : empty) {
        blocks_.give(each.address);
    }
}

std::size_t Bins::kind_of(std::size_t nbytes) noexcept {
    const std::size_t grains = (std::max<std::size_t>(nbytes, 1) - 1) / GRAIN;
    if (grains < FINE) {
        return grains;
    }
    const auto doublings = static_cast<std::size_t>(std::bit_width(grains / FINE));
    return FINE * doublings + (grains >> (doublings - 1)) - FINE;
}

std::size_t Bins::size_of(std::size_t kind) noexcept {
    if (kind < FINE) {
        return GRAIN * (kind + 1);
    }
    return GRAIN * (FINE + kind % FINE + 1) << (kind / FINE - 1);
}

// Return the slab that contains `address`, or null. Slabs are not aligned, so the slab begins in
// the same `SLAB`-sized part of the address space as `address`, or in the part before.
const Bins::List::iterator* Bins::slab_of(const void* address) noexcept {
    for (const bool before : {false, true}) {
        const void* part = part_of(address, SLAB, before);
        const auto* found = part == nullptr ? nullptr : by_part_.find(part);
        if (found != nullptr && (*found)->address <= address &&
            address < (*found)->address + SLAB) {
            return found;
        }
    }
    return nullptr;
}

// Take a piece from `slab`, which must have a free piece. The caller holds the lock of the arena.
void* Bins::take_from(List::iterator slab) noexcept {
    void* piece = slab->freed;
    if (piece != nullptr) {
        slab->freed = *static_cast<void**>(piece);
    } else {
        piece = slab->address + slab->piece * slab->cut++;
    }
    blocks_.note_asked(static_cast<Bytes>(slab->piece));
    if (++slab->live == slab->pieces()) {
        full_.splice(full_.end(), open_[slab->kind], slab);
    }
    return piece;
}

}  // namespace rekindle
