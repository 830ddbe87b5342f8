#include "neighbors.h"

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../torch/storage_ptr.h"
#include "driver.h"
#include "own_policy.h"
#include "program.h"

namespace rekindle {

namespace {

double loss_of(const Block& block) noexcept {
    return block.used ? block.loss.value_or(0) : 0;
}

// Return the total loss (policy score) of evicting the blocks in `window`. Each window is summed
// from scratch, because rounding errors of a running sum would accumulate.
double loss_of(std::span<const Block> window) noexcept {
    double total = 0;
    for (const Block& block : window) {
        total += loss_of(block);
    }
    return total;
}

}  // namespace

std::optional<Window> cheapest_window(std::span<const Block> blocks, Bytes nbytes) {
    std::optional<Window> best;
    std::size_t first = 0;
    for (std::size_t last = 0; last < blocks.size(); ++last) {
        const Block& block = blocks[last];
        if (block.used && !block.loss) {
            first = last + 1;
            continue;
        }
        const Bytes end = block.address + block.nbytes;
        for (; first <= last && end - blocks[first].address >= nbytes; ++first) {
            const double total = loss_of(blocks.subspan(first, last - first + 1));
            if (!best || total < best->loss) {
                best = {total, first, last};
            }
        }
    }
    return best;
}

std::optional<Release> cheapest_release(const Segments& segments, Bytes nbytes) {
    struct Offer final {
        double loss;
        Bytes nbytes;
        std::size_t number;

        double for_a_byte() const noexcept { return loss / static_cast<double>(nbytes); }
    };

    std::vector<Offer> offers;
    for (std::size_t number = 0; number < segments.size(); ++number) {
        const std::vector<Block>& blocks = segments[number];
        const auto stays = [](const Block& block) { return block.used && !block.loss; };
        if (!blocks.empty() && std::ranges::none_of(blocks, stays)) {
            const Block& last = blocks.back();
            const Bytes whole = last.address + last.nbytes - blocks.front().address;
            offers.push_back({loss_of(blocks), whole, number});
        }
    }
    std::ranges::sort(offers, {}, [](const Offer& offer) {
        return std::pair(offer.for_a_byte(), offer.number);
    });
    Release release{0, {}};
    for (const Offer& offer : offers) {
        if (nbytes <= 0) {
            break;
        }
        nbytes -= offer.nbytes;
        release.loss += offer.loss;
        release.segments.push_back(offer.number);
    }
    return nbytes <= 0 ? std::optional(release) : std::nullopt;
}

bool Driver::evict_neighbors(Bytes nbytes) {
    if (!device.queues() || !device.has_neighbors || nbytes <= 0) {
        return false;
    }
    ask_allocator();
    poll_held();
    return evict_for_place(nbytes, UNLIMITED, segments_of(*this)) != Way::none;
}

// Write into each block of `segments` the loss of evicting its contents: the policy's score. Return
// the evictable storages on the device by address.
std::unordered_map<Bytes, Storage*> Driver::price(Segments& segments) {
    if (own_policy != nullptr) {
        own_policy->ask_losses(engine.clock);
    }
    std::unordered_map<Bytes, Storage*> at;
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        const StoragePtr storage_impl = each->order < 0 ? StoragePtr() : record_of(*each).at();
        if (storage_impl && storage_impl->device() == device.which()) {
            at.emplace(
                static_cast<Bytes>(reinterpret_cast<std::uintptr_t>(storage_impl->data())), each
            );
        }
    }
    for (std::vector<Block>& segment : segments) {
        for (Block& block : segment) {
            if (const auto found = at.find(block.address); block.used && found != at.end()) {
                block.loss = engine.loss(*found->second);
            }
        }
    }
    return at;
}

Way Driver::evict_for_place(Bytes nbytes, Bytes missing, Segments segments) {
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
    perform([&] { engine.evict_these(victims); });
    wait_for_copies();
    if (by_segments) {
        return Way::whole_segments;
    }
    return victims.empty() ? Way::none : Way::neighbors;
}

}  // namespace rekindle
