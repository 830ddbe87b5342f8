#include "workspaces.h"

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "../allocator/counting_allocator.h"
#include "../base/slab.h"

namespace rekindle {

namespace {

constexpr int ENOUGH = 4;  // Signatures of a kind after which its maximum is trusted.
// Smaller measurements are rounding, or numbers that were turned into tensors.
constexpr Bytes NOTICED = 1'024;

// Measurements of operators of one kind.
struct Kind final {
    int seen = 0;  // Signatures with at least one measured call.
    Bytes most = 0;
    bool copies = false;  // One of them needed about as much as its inputs and outputs take.
};

// By name, and by whether they ran on an accelerator.
using Kinds = std::map<std::pair<std::string, bool>, Kind>;

Kinds& kinds() {
    static auto& made = leaky_singleton<Kinds>();
    return made;
}

// All matrix products count as one kind.
std::string_view kind_of(const Facts& facts) {
    std::string_view name = facts.name;
    while (name.ends_with('_')) {
        name.remove_suffix(1);
    }
    return name.ends_with("mm") || name.ends_with("matmul") ? "product" : name;
}

// Return the bytes of its inputs and outputs.
Bytes touched_by(const Signature& signature) {
    Bytes touched = std::max<Bytes>(0, signature.needed);
    for (const Geometry& each : signature.geometries) {
        touched += each.nbytes();
    }
    return touched;
}

// Return the bytes of a copy of those. CPUs compute in single precision, so a copy of
// half-precision numbers is larger.
Bytes one_copy(const Signature& signature, const Device& device) {
    const bool wider =
        !device.queues() && std::ranges::any_of(signature.geometries, [](const auto& each) {
            return each.dtype.toScalarType() == at::kHalf ||
                   each.dtype.toScalarType() == at::kBFloat16;
        });
    return touched_by(signature) * (wider ? 2 : 1);
}

}  // namespace

bool WorkspaceProbe::possible(const Device& device) noexcept {
    return device.queues() || allocations_are_counted();
}

WorkspaceProbe::WorkspaceProbe(const Device& device) : device_(device), counts_(possible(device)) {
    if (device.queues()) {
        const AllocatorStats now = device.given_out();
        before_ = now.current;
        returned_ = now.returned;
    } else if (counts_) {
        watch_allocations();
    }
}

WorkspaceProbe::~WorkspaceProbe() {
    if (counts_ && !device_.queues()) {
        watched_allocations();  // End the measurement even if the call failed.
    }
}

std::optional<WorkspaceUsed> WorkspaceProbe::end() const {
    if (!counts_) {
        return {};
    }
    if (device_.queues()) {
        const AllocatorStats now = device_.given_out();
        const Bytes inside = std::min(now.returned - returned_, now.peak - now.current);
        return WorkspaceUsed{std::max<Bytes>(0, inside), now.current - before_};
    }
    const GivenOutInside given = watched_allocations();
    return WorkspaceUsed{given.most - given.now, given.now};
}

void learn_workspace(Signature& signature, const WorkspaceUsed& used, const Device& device) {
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
    if (!device.guesses || (!device.queues() && !signature.facts.may_use_workspace)) {
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
