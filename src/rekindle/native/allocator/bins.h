// Small pieces of memory, cut from blocks of one size.
//
// A slab is a block cut into pieces of one size. When the program has freed all pieces of a slab,
// the block goes back to `Blocks`, so that small tensors leave no memory behind. Only `Arena` calls
// this, in any thread, without a leaf lock.
#pragma once

#include <array>
#include <cstddef>
#include <list>

#include "../base/addresses.h"
#include "../base/mutex.h"
#include "blocks.h"

namespace rekindle {

class Bins final {
public:
    explicit Bins(Blocks& blocks) noexcept : blocks_(blocks) {}

    // Pieces of at most so many bytes come from here.
    static constexpr std::size_t MOST = std::size_t{16} << 10;

    // Returns at least `nbytes`, at a multiple of 64; null: the system has none.
    void* take(std::size_t nbytes);
    // Frees what `take` returned. Returns false if it never did.
    bool give(void* address);
    // Whether `address` came from `take` and was not freed.
    bool has(const void* address) noexcept;
    // From now on one slab of each kind may hold nothing, or none (false).
    void keep_spares(bool keeps);

private:
    static constexpr std::size_t SLAB = std::size_t{64} << 10;
    static constexpr std::size_t KINDS = 48;  // sizes: multiples of 64, then 8 for each doubling

    struct Slab final {
        char* address = nullptr;
        std::size_t piece = 0;  // the size of each
        std::size_t kind = 0;
        std::size_t live = 0;
        std::size_t cut = 0;    // pieces that were ever given out
        void* freed = nullptr;  // the last piece that was freed, which has the address of the next

        std::size_t pieces() const noexcept { return SLAB / piece; }
    };

    using List = std::list<Slab>;

    static std::size_t kind_of(std::size_t nbytes) noexcept;
    static std::size_t size_of(std::size_t kind) noexcept;
    const List::iterator* slab_of(const void* address) noexcept;
    void* take_from(List::iterator slab) noexcept;

    Blocks& blocks_;
    SpinLock& lock_ = leaf(Leaf::arena);
    std::array<List, KINDS> open_;  // with a free piece
    List full_;
    // By the part of the addresses, `SLAB` long, in which a slab begins.
    Addresses<List::iterator> by_part_;
    bool keeps_spares_ = false;
};

}  // namespace rekindle
