#include "neighbors.h"

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

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

}  // namespace rekindle
