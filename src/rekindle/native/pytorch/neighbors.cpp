#include "neighbors.h"

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "driver.h"
#include "own_policy.h"
#include "python.h"

namespace rekindle {

namespace {

double loss_of(const Block& block) noexcept {
    return block.used ? block.loss.value_or(0) : 0;
}

// No difference of sums, which would drift.
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

bool Driver::evict_neighbors(Bytes nbytes) {
    if (!device.queues() || !device.has_neighbors || nbytes <= 0) {
        return false;
    }
    ask_allocator();
    poll_held();
    std::vector<std::vector<Block>> segments = segments_of(*this);
    if (own_policy != nullptr) {
        own_policy->ask_losses(engine.clock);
    }
    std::unordered_map<Bytes, Storage*> at;
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        const Home home = each->order < 0 ? Home() : record_of(*each).at();
        if (home && home->device() == device.which()) {
            at.emplace(static_cast<Bytes>(reinterpret_cast<std::uintptr_t>(home->data())), each);
        }
    }
    std::optional<Window> best;
    std::vector<Ref<Storage>> victims;
    for (std::vector<Block>& segment : segments) {
        for (Block& block : segment) {
            if (const auto found = at.find(block.address); block.used && found != at.end()) {
                block.loss = engine.loss(*found->second);
            }
        }
        const std::optional<Window> window = cheapest_window(segment, nbytes);
        if (!window || (best && window->loss >= best->loss)) {
            continue;
        }
        best = window;
        victims.clear();
        for (std::size_t i = window->first; i <= window->last; ++i) {
            if (segment[i].used) {
                victims.emplace_back(at.at(segment[i].address));
            }
        }
    }
    perform([&] { engine.evict_these(victims); });
    return !victims.empty();
}

}  // namespace rekindle
