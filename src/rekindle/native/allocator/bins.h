// Allocator for small pieces of memory, cut from blocks of one size.
//
// A slab is a block cut into pieces of one size. When the program has freed all pieces of a slab,
// the block returns to `Blocks`, so that small tensors do not keep memory mapped. Only `Arena`
// calls this, in any thread, without holding a leaf lock.
#pragma once

#include <array>
#include <cstddef>
#include <list>

#include "../base/address_map.h"
#include "../base/mutex.h"
#include "blocks.h"

namespace rekindle {

class Bins final {
public:
    explicit Bins(Blocks& blocks) noexcept : blocks_(blocks) {}

    // Largest request in bytes that `Bins` serves.
    static constexpr std::size_t MOST = std::size_t{16} << 10;

    // Return a piece of at least `nbytes` bytes, aligned to 64 bytes; null if the system has no
    // memory.
    void* take(std::size_t nbytes);
    // Free a piece that `take` returned. Return false if `address` is not such a piece.
    bool give(void* address);
    // Return true if `take` returned `address` and it was not freed since.
    bool has(const void* address) noexcept;
    // If `keeps`, keep one empty slab of each piece size from now on. Otherwise free all empty
    // slabs.
    void keep_spares(bool keeps);

private:
    static constexpr std::size_t SLAB = std::size_t{64} << 10;
    // Number of piece sizes: multiples of 64 bytes, then 8 sizes per doubling.
    static constexpr std::size_t KINDS = 48;

    struct Slab final {
        char* address = nullptr;
        std::size_t piece = 0;  // Size of each piece in bytes.
        std::size_t kind = 0;
        std::size_t live = 0;
        // Number of pieces that were handed out at least once; those after them are unused.
        std::size_t cut = 0;
        // Last freed piece. Its first word holds the address of the piece freed before it.
        void* freed = nullptr;

        std::size_t pieces() const noexcept { return SLAB / piece; }
    };

    using List = std::list<Slab>;

    static std::size_t kind_of(std::size_t nbytes) noexcept;
    static std::size_t size_of(std::size_t kind) noexcept;
    const List::iterator* slab_of(const void* address) noexcept;
    void* take_from(List::iterator slab) noexcept;

    Blocks& blocks_;
    SpinLock& lock_ = leaf(Leaf::arena);
    std::array<List, KINDS> open_;  // Slabs with a free piece, one list per piece size.
    List full_;
    // Slabs by the part of the address space in which they begin. Parts are `SLAB` bytes long and
    // aligned.
    AddressMap<List::iterator> by_part_;
    bool keeps_spares_ = false;
};

}  // namespace rekindle
