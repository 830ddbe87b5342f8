#include "reserved.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "own_policy.h"

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
    const Bytes given = is_the_budget ? engine_.budget : UNLIMITED;
    const Bytes limit = std::min(given, found_.value_or(UNLIMITED));
    // leave some reserved memory for small results
    const Bytes for_small = std::min<Bytes>(limit / 64, SEGMENT);
    return device_.reserved() + growth_for(nbytes) - (limit - for_small);
}

void Reserved::find_place(Bytes nbytes) {
    if (!limited() || nbytes <= SMALL || !device_.finds_places || device_.is_capturing()) {
        return;
    }
    nbytes = device_.rounded(nbytes);
    if (take(nbytes) || missing(nbytes) <= 0) {
        return;
    }
    if (device_.reserved() == reserved_then_ && since_ < TRUSTED) {
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
    switch (evict_for_place(nbytes, missing(nbytes), now())) {
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
    device_.empty_cache();
    ask_allocator();
    count_free_blocks();
}

// Evict `nbytes`, then four times as much, wherever the values lie in memory. Used if neither
// evicting neighbors nor emptying whole segments gives a free block.
void Reserved::make_by_sum(Bytes nbytes) {
    for (const Bytes less : {nbytes, 4 * nbytes}) {
        events_.perform([&] { engine_.shrink(engine_.memory - less); });
        events_.wait_for_copies();
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
// to the registry counts as not evictable until the next query.
void Reserved::ask_allocator() {
    segments_ = segments_of(frees_);
    reserved_then_ = device_.reserved();
    since_ = 0;
    std::unordered_set<Bytes> known;
    registry_.each_on_device([&](Bytes address, Bytes) { known.insert(address); });
    for (std::vector<Block>& segment : segments_) {
        for (Block& block : segment) {
            block.used = block.used && !known.contains(block.address);
        }
    }
}

// Return the allocator's segments as they are now: the blocks of the last query, updated by the
// storages that the program has made or freed since.
Segments Reserved::now() const {
    std::vector<Block> known;
    registry_.each_on_device([&](Bytes address, Bytes nbytes) {
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

bool Reserved::evict_neighbors(Bytes nbytes) {
    if (!device_.queues() || !device_.has_neighbors || nbytes <= 0) {
        return false;
    }
    frees_.outside.ask_allocator();
    frees_.poll_held();
    return evict_for_place(nbytes, UNLIMITED, segments_of(frees_)) != Way::none;
}

// Write into each block of `segments` the loss of evicting its contents: the policy's score. Return
// the evictable storages on the device by address.
std::unordered_map<Bytes, Storage*> Reserved::price(Segments& segments) {
    if (own_policy_ != nullptr) {
        own_policy_->ask_losses(engine_.clock);
    }
    std::unordered_map<Bytes, Storage*> at;
    for (Storage* each = engine_.first_storage(); each != nullptr; each = each->next) {
        const StoragePtr storage_impl = each->order < 0 ? StoragePtr() : record_of(*each).at();
        if (storage_impl && storage_impl->device() == device_.which()) {
            at.emplace(
                static_cast<Bytes>(reinterpret_cast<std::uintptr_t>(storage_impl->data())), each
            );
        }
    }
    for (std::vector<Block>& segment : segments) {
        for (Block& block : segment) {
            if (const auto found = at.find(block.address); block.used && found != at.end()) {
                block.loss = engine_.loss(*found->second);
            }
        }
    }
    return at;
}

Way Reserved::evict_for_place(Bytes nbytes, Bytes missing, Segments segments) {
    const std::unordered_map<Bytes, Storage*> at = price(segments);
    std::optional<Window> best;
    std::span<const Block> chosen;
    for (const std::vector<Block>& segment : segments) {
        const std::optional<Window> window = cheapest_window(segment, nbytes);
        if (window && (!best || window->loss < best->loss)) {
            best = window;
            chosen = std::span(segment).subspan(window->first, window->last - window->first + 1);
        }
    }
    const std::optional<Release> release =
        missing == UNLIMITED ? std::nullopt : cheapest_release(segments, missing);
    const bool by_segments = release && (!best || release->loss < best->loss);
    std::vector<Ref<Storage>> victims;
    const auto go = [&](std::span<const Block> blocks) {
        for (const Block& block : blocks) {
            if (block.used) {
                victims.emplace_back(at.at(block.address));
            }
        }
    };
    if (by_segments) {
        std::ranges::for_each(release->segments, [&](std::size_t each) { go(segments[each]); });
    } else {
        go(chosen);
    }
    events_.perform([&] { engine_.evict_these(victims); });
    events_.wait_for_copies();
    if (by_segments) {
        return Way::whole_segments;
    }
    return victims.empty() ? Way::none : Way::neighbors;
}

}  // namespace rekindle
