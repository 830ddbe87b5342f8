// Allocator for small pieces of memory, cut from larger blocks.
//
// A slab is a block cut into pieces of one size. When the program has freed all pieces of a slab,
// the block returns to `Blocks`, so that small tensors do not keep memory mapped. Only `Arena`
// calls `Bins`, in any thread, without holding a leaf lock.
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

    // Allocate a piece of at least `nbytes` bytes, aligned to 64 bytes. Return null if the system
    // has no memory.
    void* take(std::size_t nbytes);
    // Free the piece at `address`, which `take` returned. Return false if no such piece is in use.
    bool give(void* address);
    // Return true if `take` returned the piece at `address`, and the piece was not freed since.
    bool has(const void* address) noexcept;
    // If `keeps`, keep one slab without used pieces for each piece size from now on. Otherwise free
    // all slabs without used pieces.
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
        // Number of pieces that were allocated at least once. The other pieces lie behind these.
        std::size_t cut = 0;
        // Last freed piece. Its first word has the address of the piece that was freed before this
        // one.
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
    // Slabs by the part of the address space in which they begin. Each part has `SLAB` bytes, and
    // begins at a multiple of `SLAB`.
    AddressMap<List::iterator> by_part_;
    bool keeps_spares_ = false;
};

}  // namespace rekindle
