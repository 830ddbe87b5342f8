#include "blocks.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>

namespace rekindle {

namespace {

std::size_t in_pages(std::size_t nbytes) noexcept {
    static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return (nbytes + page - 1) / page * page;
}

// Map `size` bytes; null if the system has no memory.
char* map(std::size_t size) noexcept {
    constexpr int access = PROT_READ | PROT_WRITE;
    void* found = mmap(nullptr, size, access, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return found == MAP_FAILED ? nullptr : static_cast<char*>(found);
}

// Unmap a block. The system refuses to unmap a part of a mapped range if the process has too many
// ranges (`vm.max_map_count`). In that case the pages are freed, and only the addresses stay in
// use.
void unmap(char* address, std::size_t size) noexcept {
    if (munmap(address, size) != 0) {
        madvise(address, size, MADV_DONTNEED);
    }
}

// Let the system take the pages of a block when it needs memory. Until then they stay mapped.
// Return false if the system does not support this.
bool free_lazily([[maybe_unused]] char* address, [[maybe_unused]] std::size_t size) noexcept {
#ifdef MADV_FREE
    return madvise(address, size, MADV_FREE) == 0;
#else
    return false;
#endif
}

// Move the pages at `from` to the address `to`, and free the pages that were at `to`. If the system
// is not Linux, or refuses, free the pages at `from` and keep those at `to`.
void move_pages(
    [[maybe_unused]] char* from, [[maybe_unused]] std::size_t size, [[maybe_unused]] char* to
) noexcept {
#ifdef __linux__
    if (mremap(from, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, to) != MAP_FAILED) {
        return;
    }
#endif
    unmap(from, size);
}

// Blocks in use are partly unused, because sizes are rounded up to pages and slabs have free
// pieces. Such bytes do not count against the limit, up to 1/16 of the limit. If they did, a full
// budget would leave no room for free blocks, and each allocation after an eviction would map new
// pages.
constexpr Bytes UNCHARGED = 16;
// Blocks, free or in use, may exceed the limit by this many bytes. Without this spare room, a full
// budget of a few MiB would leave no room for free blocks, and most allocations would map new
// pages.
constexpr Bytes SPARE = Bytes{4} << 20;
constexpr std::size_t LEAST = std::size_t{16} << 10;  // Smallest block worth keeping, in bytes.

}  // namespace

// List of free blocks to unmap. The destructor unmaps these blocks, after the arena's lock was
// released.
struct Blocks::Evicted final {
    List blocks;

    Evicted() = default;
    Evicted(const Evicted&) = delete;
    Evicted& operator=(const Evicted&) = delete;

    ~Evicted() { clear(); }

    void clear() noexcept {
        for (const Block& each : blocks) {
            unmap(each.address, each.size);
        }
        blocks.clear();
    }
};

void* Blocks::take(std::size_t nbytes, std::size_t asked) {
    const std::size_t size = in_pages(nbytes);
    void* found = reuse(size, asked);
    return found == nullptr ? map_new(size, asked) : found;
}

// Use the smallest free block of at least `size` bytes, or a part of this block. Return null if
// there is no such block.
void* Blocks::reuse(std::size_t size, std::size_t asked) {
    const std::scoped_lock guard(lock_);
    const auto fit = by_size_.lower_bound(size);
    if (fit == by_size_.end()) {
        return nullptr;
    }
    const auto block = fit->second;
    split(block, size);
    note_not_free(block);
    block->asked = asked;
    charge(*block, 1);
    live_.splice(live_.end(), free_, block);
    by_address_.put(block->address, block);
    return block->address;
}

// Map a new block. To stay within the limit, unmap free blocks or move their pages into the new
// block.
void* Blocks::map_new(std::size_t size, std::size_t asked) {
    List made(1);
    Block& block = made.front();
    block.size = size;
    block.asked = asked;
    List pieces;
    {
        Evicted evicted;
        const std::scoped_lock guard(lock_);
        take_pieces(size, pieces);
        charge(block, 1);
        evict(evicted);
    }
    block.address = map_anyway(size);
    char* at = block.address;
    for (const Block& each : pieces) {
        if (at == nullptr) {
            unmap(each.address, each.size);
            continue;
        }
        move_pages(each.address, each.size, at);
        at += each.size;
    }
    const std::scoped_lock guard(lock_);
    if (block.address == nullptr) {
        charge(block, -1);
        return nullptr;
    }
    by_address_.put(block.address, made.begin());
    live_.splice(live_.end(), made);
    return block.address;
}

bool Blocks::give(void* address) {
    Evicted evicted;
    {
        const std::scoped_lock guard(lock_);
        const auto* found = by_address_.find(address);
        if (found == nullptr) {
            return false;
        }
        const auto block = *found;
        by_address_.take(address);
        charge(*block, -1);
        block->is_earlier = false;
        if (ended_) {
            evicted.blocks.splice(evicted.blocks.end(), live_, block);
            return true;
        }
        free_.splice(free_.end(), live_, block);
        join_neighbors(block);
        note_free(block);
        evict(evicted);
    }
    return true;
}

bool Blocks::has(const void* address) noexcept {
    const std::scoped_lock guard(lock_);
    return by_address_.find(address) != nullptr;
}

void Blocks::begin() {
    const std::scoped_lock guard(lock_);
    for (Block& block : live_) {
        // Slabs (`asked` is 0) also serve the new budget, so they count.
        if (!block.is_earlier && block.asked > 0) {
            charge(block, -1);
            block.is_earlier = true;
            charge(block, 1);
        }
    }
    if (std::exchange(ended_, false)) {
        for (const Block& block : free_) {
            cached_ += static_cast<Bytes>(block.size);
        }
    }
}

void Blocks::end(bool lazily) {
    Evicted lazy;
    Evicted refused;
    {
        const std::scoped_lock guard(lock_);
        limit_ = spare_ = 0;
        while (!free_.empty()) {
            evict_oldest(lazy);
        }
        ended_ = true;
    }
    if (!lazily) {
        return;  // the destructor of `lazy` unmaps the blocks
    }
    // Meanwhile no thread can get these blocks and write to them.
    for (auto each = lazy.blocks.begin(); each != lazy.blocks.end();) {
        const auto block = each++;
        if (!free_lazily(block->address, block->size)) {
            refused.blocks.splice(refused.blocks.end(), lazy.blocks, block);
        }
    }
    const std::scoped_lock guard(lock_);
    for (auto each = lazy.blocks.begin(); each != lazy.blocks.end();) {
        const auto block = each++;
        free_.splice(free_.end(), lazy.blocks, block);
        note_free(block);
    }
}

void Blocks::limit(Bytes most) {
    Evicted evicted;
    {
        const std::scoped_lock guard(lock_);
        limit_ = most;
        spare_ = SPARE;
        evict(evicted);
    }
}

Bytes Blocks::room() const noexcept {
    const Bytes unused = mapped_ - asked_;
    const Bytes live = mapped_ - std::min(unused, limit_ / UNCHARGED);
    return limit_ + spare_ - outside_.load(std::memory_order_relaxed) - live - cached_;
}

// Move the largest free blocks to `pieces` if a new block of `size` bytes would exceed the limit.
// The new block can then reuse their pages.
void Blocks::take_pieces(std::size_t size, List& pieces) {
    std::size_t wanted = size;
    while (wanted >= LEAST && !free_.empty() && room() < static_cast<Bytes>(size)) {
        const auto largest = std::prev(by_size_.end())->second;
        split(largest, wanted);
        if (largest->size > wanted) {
            return;
        }
        note_not_free(largest);
        pieces.splice(pieces.end(), free_, largest);
        wanted -= largest->size;
    }
}

// Add the bytes of a block in use to the totals (`times` = 1), or subtract them (-1).
void Blocks::charge(const Block& block, int times) noexcept {
    if (block.is_earlier) {
        earlier_ += times * static_cast<Bytes>(block.size);
        return;
    }
    mapped_ += times * static_cast<Bytes>(block.size);
    asked_ += times * static_cast<Bytes>(block.asked);
}

// Add a free block to the indexes of free blocks.
void Blocks::note_free(List::iterator block) {
    if (!ended_) {
        cached_ += static_cast<Bytes>(block->size);
    }
    block->place = by_size_.emplace(block->size, block);
    by_start_.put(block->address, block);
    by_end_.put(block->address + block->size, block);
}

void Blocks::note_not_free(List::iterator block) noexcept {
    if (!ended_) {
        cached_ -= static_cast<Bytes>(block->size);
    }
    by_size_.erase(block->place);
    by_start_.take(block->address);
    by_end_.take(block->address + block->size);
}

// Merge `block`, which becomes free, with the free blocks right before and after it.
void Blocks::join_neighbors(List::iterator block) {
    if (const auto* before = by_end_.find(block->address)) {
        const auto other = *before;
        note_not_free(other);
        block->address = other->address;
        block->size += other->size;
        free_.erase(other);
    }
    if (const auto* behind = by_start_.find(block->address + block->size)) {
        const auto other = *behind;
        note_not_free(other);
        block->size += other->size;
        free_.erase(other);
    }
}

// Split a free block after `size` bytes, unless the rest would be too small.
void Blocks::split(List::iterator block, std::size_t size) {
    if (block->size < size + LEAST) {
        return;
    }
    note_not_free(block);
    const auto rest =
        free_.emplace(block, Block{block->address + size, block->size - size, 0, false, {}});
    block->size = size;
    note_free(rest);
    note_free(block);
}

// Move free blocks to `evicted`, the oldest first, until the remaining blocks are within the limit.
// Of the last moved block, only a part may be needed.
void Blocks::evict(Evicted& evicted) {
    for (Bytes over = -room(); over > 0 && !free_.empty(); over = -room()) {
        split(free_.begin(), std::max(in_pages(static_cast<std::size_t>(over)), LEAST));
        evict_oldest(evicted);
    }
}

void Blocks::evict_oldest(Evicted& evicted) {
    const auto oldest = free_.begin();
    note_not_free(oldest);
    evicted.blocks.splice(evicted.blocks.end(), free_, oldest);
}

// Map `size` bytes. If the system has no memory, unmap all free blocks and try again. Return null
// if this fails too. The caller must not hold the arena's lock.
char* Blocks::map_anyway(std::size_t size) {
    char* found = map(size);
    if (found == nullptr) {
        Evicted evicted;
        {
            const std::scoped_lock guard(lock_);
            while (!free_.empty()) {
                evict_oldest(evicted);
            }
        }
        evicted.clear();
        found = map(size);
    }
    return found;
}

Bytes resident_bytes() noexcept {
    const auto close = [](std::FILE* file) { std::fclose(file); };
    const std::unique_ptr<std::FILE, decltype(close)> file(std::fopen("/proc/self/statm", "r"));
    std::array<char, 128> said{};  // The file has total pages, resident pages, ...
    if (file == nullptr || std::fgets(said.data(), said.size(), file.get()) == nullptr) {
        return 0;
    }
    char* second = nullptr;
    std::strtoll(said.data(), &second, 10);
    return static_cast<Bytes>(std::strtoll(second, nullptr, 10)) * sysconf(_SC_PAGESIZE);
}

}  // namespace rekindle
