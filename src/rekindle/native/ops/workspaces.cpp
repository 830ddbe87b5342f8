#include "workspaces.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "../allocator/counting_allocator.h"
#include "../base/slab.h"

namespace rekindle {

namespace {

// Number of signatures of one kind of operators that must be measured before the largest of their
// workspaces is trusted as a guess for other signatures.
constexpr int ENOUGH = 4;
// Most signatures whose workspaces are remembered for later processes.
constexpr std::size_t MOST_REMEMBERED = 20'000;

// Workspaces measured for operators of one kind: those with the same name, or all matrix products.
struct Kind final {
    int seen = 0;  // Number of signatures with at least one measured call.
    Bytes most = 0;
    // True if an operator of this kind needed at least half as much workspace as its inputs and
    // results take.
    bool copies = false;
};

// Measurements by the name of the kind, and by whether the operators ran on an accelerator.
using Kinds = std::map<std::pair<std::string, bool>, Kind>;

Kinds& kinds() {
    static auto& made = leaky_singleton<Kinds>();
    return made;
}

// Workspace and newly allocated memory (bytes) of first calls on the CPU, in this process or an
// earlier one, by the number of the call's signature.
struct Remembered final {
    std::unordered_map<std::int64_t, Bytes> workspaces;
    // Signatures measured since `take_new_workspaces` was called.
    std::unordered_set<std::int64_t> changed;
};

Remembered& remembered() {
    static auto& made = leaky_singleton<Remembered>();
    return made;
}

// Remember for later processes how many bytes the first call of a signature needed. Calls that need
// no workspace are left out. So are operators of other libraries, because only PyTorch's own
// operators need the same amount in every process.
void remember_first_call(Signature& signature, const WorkspaceUsed& used) {
    const Facts& facts = signature.facts;
    if (!facts.is_aten || (signature.workspace == 0 && !facts.may_use_workspace)) {
        return;
    }
    Remembered& all = remembered();
    const std::int64_t number = signature.number();
    const Bytes nbytes = used.inside + used.kept;
    const auto found = all.workspaces.find(number);
    if (found == all.workspaces.end() ? all.workspaces.size() >= MOST_REMEMBERED
                                      : found->second == nbytes) {
        return;
    }
    all.workspaces[number] = nbytes;
    all.changed.insert(number);
}

// Return how many bytes the first call of a signature needed on a CPU, in this or an earlier
// process. Return none if that is unknown.
std::optional<Bytes> remembered_need(Signature& signature, const Device& device) {
    const auto& workspaces = remembered().workspaces;
    if (device.queues() || workspaces.empty()) {
        return {};
    }
    const auto found = workspaces.find(signature.number());
    return found == workspaces.end() ? std::nullopt : std::optional(found->second);
}

// Return the kind of an operator: "product" for all matrix products, else the operator's name.
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

// Return the bytes of a copy of all inputs and results. Hardly any operator needs more workspace:
// convolutions copy inputs and results to other layouts. CPUs compute in single precision, so a
// copy of half-precision numbers takes twice the bytes there. The backward of an LSTM layer needs
// less, because it does not copy its largest input, the memory that the forward reserved. None of 4
// measured LSTM layers needed more than 0.42 such copies.
Bytes one_copy(const Signature& signature, const Device& device) {
    const bool wider =
        !device.queues() && std::ranges::any_of(signature.geometries, [](const auto& each) {
            return each.dtype.toScalarType() == at::kHalf ||
                   each.dtype.toScalarType() == at::kBFloat16;
        });
    const Bytes copy = touched_by(signature) * (wider ? 2 : 1);
    return signature.facts.name == "aten::mkldnn_rnn_layer_backward" ? copy / 2 : copy;
}

}  // namespace

bool WorkspaceProbe::possible(const Device& device) noexcept {
    return device.queues() || allocations_are_counted();
}

WorkspaceProbe::WorkspaceProbe(const Device& device, Bytes limit, std::optional<MoveLimit> move)
    : device_(device), counts_(possible(device)) {
    if (device.queues()) {
        const AllocatorStats now = device.given_out();
        before_ = now.current;
        returned_ = now.returned;
    } else if (counts_) {
        watch_allocations(limit, move);
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

Bytes WorkspaceProbe::refused() const noexcept {
    return counts_ && !device_.queues() ? watched_allocations().refused : 0;
}

void learn_workspace(Signature& signature, const WorkspaceUsed& used, const Device& device) {
    const Bytes touched = touched_by(signature);
    // If the size of the results depends on contents, `needed` is only an upper bound, and a later
    // call may reserve the exact size instead. So the workspace is what the call used in addition
    // to the results that it made.
    const Bytes made = signature.facts.dynamic ? used.kept : std::max<Bytes>(0, signature.needed);
    const Bytes once = std::max<Bytes>(0, used.kept - made);
    const Bytes most = used.inside - std::max<Bytes>(0, made - used.kept);
    const Bytes inside = most >= NOTICED ? most : 0;
    Kind& kind = kinds()[{std::string(kind_of(signature.facts)), device.queues()}];
    kind.seen += signature.watched == 0 ? 1 : 0;
    kind.most = std::max(kind.most, inside + once);
    kind.copies = kind.copies || (touched > 0 && touched <= 2 * inside);
    if (device.learns) {
        const bool first = signature.watched == 0;
        signature.took(inside);
        if (first && !device.queues()) {
            remember_first_call(signature, used);
        }
    }
}

namespace {

// Guess the workspace of the first call of a signature that no earlier process has measured.
Bytes guess_workspace(const Signature& signature, const Device& device) {
    if (!device.queues() && !signature.facts.may_use_workspace) {
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

}  // namespace

Bytes guess_need(Signature& signature, Bytes results, const Device& device) {
    if (!device.guesses) {
        return results;
    }
    if (const std::optional<Bytes> before = remembered_need(signature, device)) {
        return std::max(results, *before);
    }
    return results + guess_workspace(signature, device);
}

Bytes likely_need(Signature& signature, Bytes results, Bytes refused, const Device& device) {
    const Bytes before = remembered_need(signature, device).value_or(0);
    if (before >= refused) {
        return before;
    }
    const Bytes copy = one_copy(signature, device);
    const Bytes inside = refused - results;
    // If the workspace exceeds a copy of the inputs and results, no good estimate is known. Then
    // add half of the refused workspace, so that few attempts suffice.
    return results + (inside <= copy ? copy : inside + std::max(copy, inside / 2));
}

void remember_workspaces(const NumberedWorkspaces& measured) {
    remembered().workspaces = {measured.begin(), measured.end()};
    remembered().changed.clear();
}

NumberedWorkspaces take_new_workspaces() {
    Remembered& all = remembered();
    NumberedWorkspaces found;
    for (const std::int64_t number : all.changed) {
        found.emplace_back(number, all.workspaces[number]);
    }
    all.changed.clear();
    return found;
}

void forget_workspaces() noexcept {
    kinds().clear();
    remembered().workspaces.clear();
    remembered().changed.clear();
}

}  // namespace rekindle
