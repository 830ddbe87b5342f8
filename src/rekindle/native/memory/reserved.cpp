#include "reserved.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "driver.h"
#include "program.h"

namespace rekindle {

namespace {

constexpr Bytes MIB = Bytes{1} << 20;
// Largest result that CUDA's caching allocator puts into a segment for small results.
constexpr Bytes SMALL = MIB;
// smallest request that gets a segment of its own in CUDA's caching allocator
constexpr Bytes WHOLE = 10 * MIB;
// segment size of CUDA's caching allocator for requests above `SMALL` and below `WHOLE`
constexpr Bytes SEGMENT = 20 * MIB;
// CUDA's caching allocator rounds larger segments up to multiples of this size
constexpr Bytes COARSE = 2 * MIB;
// Number of searches for a free block after which the device's allocator is queried again.
constexpr int TRUSTED = 32;

// Return the bytes that CUDA's caching allocator reserves on the device for a request of `nbytes`.
// Follows `get_allocation_size` in c10/cuda/CUDACachingAllocator.cpp.
Bytes growth_for(Bytes nbytes) noexcept {
    return nbytes < WHOLE ? SEGMENT : (nbytes + COARSE - 1) / COARSE * COARSE;
}

bool by_address(const Block& one, const Block& other) noexcept {
    return one.address < other.address;
}

}  // namespace

// Return by how many bytes reserved memory would exceed its limit if the allocator reserved a
// segment for a new result of `nbytes`. If zero or less, the limit would hold.
Bytes Reserved::missing(Bytes nbytes) const {
    const Bytes given = is_the_budget ? driver_.engine.budget : UNLIMITED;
    const Bytes limit = std::min(given, found_.value_or(UNLIMITED));
    // leave some reserved memory for small results
    const Bytes for_small = std::min<Bytes>(limit / 64, SEGMENT);
    return driver_.device.reserved() + growth_for(nbytes) - (limit - for_small);
}

void Reserved::find_place(Bytes nbytes) {
    if (!limited() || nbytes <= SMALL || !driver_.device.finds_places ||
        driver_.device.is_capturing()) {
        return;
    }
    nbytes = driver_.device.rounded(nbytes);
    if (take(nbytes) || missing(nbytes) <= 0) {
        return;
    }
    if (driver_.device.reserved() == reserved_then_ && since_ < TRUSTED) {
        ++since_;
        count_free_blocks();
        if (take(nbytes)) {
            return;
        }
    }
    ask_allocator();
    count_free_blocks();
    if (take(nbytes)) {
        return;
    }
    ++places_;
    switch (driver_.evict_for_place(nbytes, missing(nbytes), now())) {
        case Way::neighbors:
            count_free_blocks();
            break;
        case Way::whole_segments:
            give_back();
            break;
        case Way::none:
            make_by_sum(nbytes);
            break;
    }
    take(nbytes);
}

// Let the device's allocator return its unused segments to the device.
void Reserved::give_back() {
    driver_.device.empty_cache();
    ask_allocator();
    count_free_blocks();
}

// Evict `nbytes`, then four times as much, wherever the values lie in memory. Used if neither
// evicting neighbors nor emptying whole segments gives a free block.
void Reserved::make_by_sum(Bytes nbytes) {
    for (const Bytes less : {nbytes, 4 * nbytes}) {
        driver_.perform([&] { driver_.engine.shrink(driver_.engine.memory - less); });
        driver_.wait_for_copies();
        give_back();
        if (n_free_blocks_.lower_bound(nbytes) != n_free_blocks_.end() || missing(nbytes) <= 0) {
            return;
        }
    }
}

// Mark the smallest free block of at least `nbytes` as used, as the allocator would. Return false
// if there is no such block.
bool Reserved::take(Bytes nbytes) {
    const auto found = n_free_blocks_.lower_bound(nbytes);
    if (found == n_free_blocks_.end()) {
        return false;
    }
    const Bytes rest = found->first - nbytes;
    if (--found->second == 0) {
        n_free_blocks_.erase(found);
    }
    if (rest > SMALL) {  // a smaller rest stays part of the block, as in CUDA's caching allocator
        ++n_free_blocks_[rest];
    }
    return true;
}

// Query the device's allocator for its blocks. A used block that is not memory of a storage known
// to the driver counts as not evictable until the next query.
void Reserved::ask_allocator() {
    segments_ = segments_of(driver_);
    reserved_then_ = driver_.device.reserved();
    since_ = 0;
    std::unordered_set<Bytes> known;
    driver_.registry.each_on_device([&](Bytes address, Bytes) { known.insert(address); });
    for (std::vector<Block>& segment : segments_) {
        for (Block& block : segment) {
            block.used = block.used && !known.contains(block.address);
        }
    }
}

// Return the allocator's segments as they are now: the blocks of the last query, updated by the
// storages that the driver has made or freed since.
Segments Reserved::now() const {
    std::vector<Block> known;
    driver_.registry.each_on_device([&](Bytes address, Bytes nbytes) {
        known.push_back({address, nbytes, true, {}});
    });
    std::ranges::sort(known, by_address);
    Segments found;
    for (const std::vector<Block>& queried : segments_) {
        std::vector<Block> used;
        const Block& last = queried.back();
        const Bytes end = last.address + last.nbytes;
        const auto first = std::ranges::lower_bound(known, queried.front(), by_address);
        const auto beyond = std::ranges::lower_bound(known, Block{end, 0, true, {}}, by_address);
        std::copy(first, beyond, std::back_inserter(used));
        std::ranges::copy_if(queried, std::back_inserter(used), &Block::used);
        std::ranges::sort(used, by_address);
        std::vector<Block>& segment = found.emplace_back();
        Bytes at = queried.front().address;
        for (const Block& block : used) {
            if (block.address > at) {
                segment.push_back({at, block.address - at, false, {}});
            }
            segment.push_back(block);
            at = std::max(at, block.address + block.nbytes);
        }
        if (end > at) {
            segment.push_back({at, end - at, false, {}});
        }
    }
    return found;
}

// Count the free blocks of each size in the device's allocator, as they are now.
void Reserved::count_free_blocks() {
    n_free_blocks_.clear();
    for (const std::vector<Block>& segment : now()) {
        for (const Block& block : segment) {
            if (!block.used && block.nbytes > SMALL) {
                ++n_free_blocks_[block.nbytes];
            }
        }
    }
}

}  // namespace rekindle
