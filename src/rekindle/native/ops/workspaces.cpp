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

// Number of measured signatures of a kind after which the kind's maximum is trusted.
constexpr int ENOUGH = 4;
// Smaller measurements are ignored: they come from rounding, or from numbers that became tensors.
constexpr Bytes NOTICED = 1'024;

// Workspaces measured for operators of one kind.
struct Kind final {
    int seen = 0;  // Number of signatures with at least one measured call.
    Bytes most = 0;
    // True if an operator needed about as much workspace as its inputs and outputs take.
    bool copies = false;
};

// Kinds by operator name, and by whether the operators ran on an accelerator.
using Kinds = std::map<std::pair<std::string, bool>, Kind>;

Kinds& kinds() {
    static auto& made = leaky_singleton<Kinds>();
    return made;
}

// Return the kind of an operator: its name, but all matrix products are one kind.
std::string_view kind_of(const Facts& facts) {
    std::string_view name = facts.name;
    while (name.ends_with('_')) {
        name.remove_suffix(1);
    }
    return name.ends_with("mm") || name.ends_with("matmul") ? "product" : name;
}

// Return the bytes of the inputs and outputs of a call.
Bytes touched_by(const Signature& signature) {
    Bytes touched = std::max<Bytes>(0, signature.needed);
    for (const Geometry& each : signature.geometries) {
        touched += each.nbytes();
    }
    return touched;
}

// Return the bytes of a copy of the inputs and outputs. CPUs compute in single precision, so there
// a copy of half-precision numbers is larger.
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
