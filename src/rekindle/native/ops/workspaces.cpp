#include "workspaces.h"

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "../allocator/counting.h"
#include "../base/slab.h"

namespace rekindle {

namespace {

constexpr int ENOUGH = 4;         // so many signatures of a kind tell what to expect
constexpr Bytes NOTICED = 1'024;  // less is a number made a tensor, or what is rounded

// What is known of operators of one kind.
struct Kind final {
    int seen = 0;  // signatures of which a call was seen
    Bytes most = 0;
    bool copies = false;  // one of them took about as much as it reads and makes
};

// Of operators by their names, on a device and on the CPU.
using Kinds = std::map<std::pair<std::string, bool>, Kind>;

Kinds& kinds() {
    static auto& made = immortal<Kinds>();
    return made;
}

// All products have a workspace like each other's.
std::string_view kind_of(const Facts& facts) {
    std::string_view name = facts.name;
    while (name.ends_with('_')) {
        name.remove_suffix(1);
    }
    return name.ends_with("mm") || name.ends_with("matmul") ? "product" : name;
}

// Bytes of what it reads and makes.
Bytes touched_by(const Signature& signature) {
    Bytes touched = std::max<Bytes>(0, signature.needed);
    for (const Geometry& each : signature.geometries) {
        touched += each.nbytes();
    }
    return touched;
}

// A copy of that: CPUs compute in single precision, so one of numbers in half precision is larger.
Bytes one_copy(const Signature& signature, const Device& device) {
    const bool wider =
        !device.queues() && std::ranges::any_of(signature.geometries, [](const auto& each) {
            return each.dtype.toScalarType() == at::kHalf ||
                   each.dtype.toScalarType() == at::kBFloat16;
        });
    return touched_by(signature) * (wider ? 2 : 1);
}

}  // namespace

bool Watched::possible(const Device& device) noexcept {
    return device.queues() || allocations_are_counted();
}

Watched::Watched(const Device& device) : device_(device), counts_(possible(device)) {
    if (device.queues()) {
        const GivenOut now = device.given_out();
        before_ = now.current;
        returned_ = now.returned;
    } else if (counts_) {
        watch_allocations();
    }
}

Watched::~Watched() {
    if (counts_ && !device_.queues()) {
        watched_allocations();  // whatever became of it, nobody watches any more
    }
}

std::optional<Used> Watched::end() const {
    if (!counts_) {
        return {};
    }
    if (device_.queues()) {
        const GivenOut now = device_.given_out();
        const Bytes inside = std::min(now.returned - returned_, now.peak - now.current);
        return Used{std::max<Bytes>(0, inside), now.current - before_};
    }
    const GivenOutInside given = watched_allocations();
    return Used{given.most - given.now, given.now};
}

void learn_workspace(Signature& signature, const Used& used, const Device& device) {
    const Bytes touched = touched_by(signature);
    const Bytes made = std::max<Bytes>(0, signature.needed);
    const Bytes once = std::max<Bytes>(0, used.kept - made);
    const Bytes most = used.inside - std::max<Bytes>(0, made - used.kept);
    const Bytes inside = most >= NOTICED ? most : 0;
    Kind& kind = kinds()[{std::string(kind_of(signature.facts)), device.queues()}];
    kind.seen += signature.watched == 0 ? 1 : 0;
    kind.most = std::max(kind.most, inside + once);
    kind.copies = kind.copies || (touched > 0 && touched <= 2 * inside);
    if (device.learns) {
        signature.took(inside);
    }
}

Bytes guess_workspace(const Signature& signature, const Device& device) {
    if (!device.guesses || (!device.queues() && !signature.facts.roomy)) {
        return 0;
    }
    const auto found = kinds().find({std::string(kind_of(signature.facts)), device.queues()});
    if (found == kinds().end()) {
        return one_copy(signature, device);
    }
    const Kind& kind = found->second;
    return kind.copies || kind.seen < ENOUGH ? std::max(kind.most, one_copy(signature, device))
                                             : kind.most;
}

void forget_workspaces() noexcept {
    kinds().clear();
}

}  // namespace rekindle
