#include "sliced_operation.h"

#include <algorithm>
#include <optional>
#include <ranges>
#include <vector>

#include "../engine/frame.h"
#include "../memory/evict_held_last.h"
#include "../memory/records/recipe.h"
#include "../memory/slices/evaluation.h"
#include "../torch/arguments.h"
#include "../torch/geometry.h"
#include "../torch/placeholder.h"
#include "operation.h"

namespace rekindle {

namespace {

// A share of the workspace with which a call runs at once, and a share of the budget: the engine
// makes so much room for slices. If more is free, slices are larger.
constexpr Bytes ENOUGH_SHARE = 16;
constexpr Bytes WORKSPACE_SHARE = 32;
// A share of the budget: results that are smaller are not large.
constexpr Bytes LARGE_RESULT_SHARE = 8;
// A share of a result: the recipe of the result may keep an argument that is smaller in memory.
constexpr Bytes KEPT_SHARE = 16;
// A share of the budget: smaller leaves are in memory as a whole.
constexpr Bytes LARGE_SHARE = 32;

bool is_on_cpu(const c10::TensorImpl* tensor) {
    return tensor->is_cpu() && is_plain(*tensor) && !tensor->is_conj() && !tensor->is_neg();
}

SlicedArgument argument_of(StorageRecord& record) {
    if (const SlicedCallPtr& sliced = sliced_call_of(record)) {
        return {nullptr, sliced};
    }
    return {&record, nullptr};
}

// Return true if `record`, the leaf of a sliced call, can be computed in slices instead.
bool can_be_sliced(const StorageRecord& record) {
    if (!record.replayable || record.pinned || record.root.next != nullptr) {
        return false;
    }
    const Recipe& recipe = recipe_of(*record.root.call);
    const SlicedCallPtr& sliced = recipe.sliced();
    return sliced ? sliced->slicing().results.size() == 1 : can_run_in_slices(recipe);
}

// Return `call`, with `node` in place of the leaf `leaf`.
// NOLINTNEXTLINE(misc-no-recursion): chains of sliced calls are as short as the program's
SlicedCallPtr replaced(
    const SlicedCallPtr& call, const StorageRecord& leaf, const SlicedCallPtr& node
) {
    SlicedCallPtr made;
    for (std::size_t i = 0; i < call->arguments.size(); ++i) {
        const SlicedArgument& each = call->arguments[i];
        SlicedArgument now = each;
        if (each.call) {
            now.call = replaced(each.call, leaf, node);
        } else if (each.leaf == &leaf) {
            now = {nullptr, node};
        }
        if (now.call != each.call) {
            if (!made) {
                made = c10::make_intrusive<SlicedCall>(*call);
                made->axes = {};  // found out for the leaf
            }
            made->arguments[i] = now;
        }
    }
    return made ? made : call;
}

// Return `call`; null if it would take too many calls.
SlicedCallPtr short_enough(SlicedCallPtr call) {
    return calls_of(*call) <= MOST_CALLS ? std::move(call) : nullptr;
}

// Find out how calls with `signature` run in slices. Releases the session mutex for a moment.
void find_slicing(
    Session& session, Signature& signature, std::span<const c10::IValue> unkeyed_args, Locked& lock
) {
    if (signature.slicing) {
        return;
    }
    Slicing found;
    {
        const Unlocked others(lock);
        found = signature.find_slicing(unkeyed_args);
    }
    session.registry.drain();
    if (!signature.slicing) {
        signature.slicing = std::move(found);
    }
}

}  // namespace

bool SlicedOperation::reads_value_without_room() const {
    if (session_.registry.placeholders == 0) {
        return false;
    }
    const Engine& engine = session_.engine;
    return std::ranges::any_of(parsed_.tensors, [&](const c10::TensorImpl* tensor) {
        const StorageRecord* record = session_.registry.find_record(*tensor);
        return record != nullptr && sliced_call_of(*record) &&
               session_.room.bytes_to_restore(*record) >
                   engine.budget - engine.memory - engine.in_flight;
    });
}

bool SlicedOperation::has_no_room() const {
    return has_slices() && !session_.engine.has_room(bytes_of_results());
}

bool SlicedOperation::merits_recipe() const {
    if (!is_large()) {
        return false;
    }
    const Bytes little =
        std::max(session_.engine.budget / SMALL_SHARE, bytes_of_results() / KEPT_SHARE);
    return std::ranges::none_of(parsed_.tensors, [&](const c10::TensorImpl* each) {
        const AddressEntry* found = session_.registry.find(*each);
        return found != nullptr && found->maker != nullptr && found->nbytes > little &&
               (found->record == nullptr || found->record->pinned || !found->record->replayable);
    });
}

bool SlicedOperation::leaves_no_room(Locked& lock) {
    if (!is_any_large(parsed_.tensors, session_.engine.budget) || !may()) {
        return false;
    }
    find_slicing(lock);
    // After the operator, nothing else may refer to what it reads.
    return has_slices() && is_large() &&
           !session_.engine.has_room(2 * bytes_of_results() - bytes_read());
}

bool SlicedOperation::has_slices() const {
    return parsed_.signature->slicing && !parsed_.signature->slicing->results.empty();
}

bool SlicedOperation::may() const {
    return session_.may_slice() && rekindle::has_slices(facts_, call_.op) && !parsed_.opaque &&
           parsed_.written.size() == (parsed_.takes_over ? 1U : 0U) && parsed_.parts.empty() &&
           !parsed_.tensors.empty() && std::ranges::all_of(parsed_.tensors, is_on_cpu);
}

void SlicedOperation::find_slicing(Locked& lock) {
    rekindle::find_slicing(session_, *parsed_.signature, parsed_.unkeyed_args, lock);
}

Bytes SlicedOperation::bytes_of_results() const {
    Bytes total = 0;
    // NOLINTNEXTLINE(bugprone-unchecked-optional-access): found before
    for (const Geometry& each : parsed_.signature->slicing->results) {
        total += session_.device.rounded(each.nbytes());
    }
    return total;
}

SlicedOperation::~SlicedOperation() {
    std::vector<const StorageRecord*>& awaited = session_.in_progress.awaited;
    for (StorageRecord* each : retained_) {
        awaited.erase(std::ranges::find(awaited, each));
        session_.registry.free_queue.released(*each);
    }
}

// Keep the leaves of `sliced` restorable, as autograd does with saved tensors. Until the graph
// knows the call, nothing else needs them, and other threads run while one of them is restored.
void SlicedOperation::retain_leaves(const SlicedCall& sliced) {
    std::vector<StorageRecord*> leaves;
    collect_leaves(sliced, leaves);
    for (StorageRecord* each : leaves) {
        if (std::ranges::find(retained_, each) == retained_.end()) {
            retained_.push_back(each);
            session_.in_progress.awaited.push_back(each);
            session_.storages.retain(*each, each->at());
        }
    }
}

SlicedCallPtr SlicedOperation::sliced_call(
    std::span<const Ref<Storage>> inputs, bool grad_mode
) const {
    auto made = c10::make_intrusive<SlicedCall>();
    made->signature = parsed_.signature;
    made->unkeyed_args.assign(parsed_.unkeyed_args.begin(), parsed_.unkeyed_args.end());
    made->grad_mode = grad_mode;
    for (const Ref<Storage>& each : inputs) {
        if (!each) {
            return nullptr;
        }
        StorageRecord& record = record_of(*each);
        refuse_lost(record);
        const bool is_read = !reads_only_shape(facts_, made->arguments.size());
        made->arguments.push_back(is_read ? argument_of(record) : SlicedArgument());
    }
    return short_enough(std::move(made));
}

bool SlicedOperation::run(
    std::span<const Ref<Storage>> inputs, bool recorded, bool grad_mode, Locked& lock
) {
    const auto attempt = [&] {
        return with_leaves(sliced_call(inputs, grad_mode), lock, [&](const SlicedCallPtr& sliced) {
            return (defers_early() && defer(sliced)) || compute(sliced, recorded) ||
                   (is_large() && has_no_room() && defer(sliced));
        });
    };
    bool done = attempt();
    if (!done) {
        with_held_evictable(session_, lock, [&] { done = attempt(); });
    }
    if (!done && has_no_room()) {
        // At last, a small result has no room either. Each reader computes it, and may find less
        // room, so it is computed from small leaves.
        std::vector<SlicedCallPtr> calls;
        with_leaves(sliced_call(inputs, grad_mode), lock, [&](const SlicedCallPtr& sliced) {
            calls.push_back(sliced);
            return false;
        });
        done = std::ranges::any_of(std::views::reverse(calls), [&](const SlicedCallPtr& sliced) {
            return defer(sliced);
        });
    }
    session_.has_sliced = session_.has_sliced || done;
    return done;
}

// Call `attempt(sliced)` for `sliced`, and then with one leaf less each time, until it returns
// true. Return false if it never does.
template <class F>
bool SlicedOperation::with_leaves(SlicedCallPtr sliced, Locked& lock, F&& attempt) {
    while (sliced) {
        retain_leaves(*sliced);
        try {
            if (attempt(sliced)) {
                return true;
            }
        } catch (const UnequalSlices&) {
            continue;  // the signature knows now along which axis it must not be sliced
        } catch (const Lost&) {
            return false;  // another thread wrote a leaf, and the arguments are restored or lost
        } catch (const OutOfBudgetError&) {  // NOLINT(bugprone-empty-catch): smaller leaves may do
        }
        sliced = with_fewer_leaves(sliced, lock);
    }
    return false;
}

// Return the smallest slices with which a call should run: smaller ones take longer.
std::optional<SlicePlan> SlicedOperation::smallest_plan(const SlicedCall& sliced) const {
    const Bytes most = session_.engine.budget / WORKSPACE_SHARE;
    return plan_of(sliced, std::min(useful_workspace(sliced) / ENOUGH_SHARE, most));
}

// Compute the results, which are in memory afterwards. Return false if they have no room. Throw
// `OutOfBudgetError` if the leaves have none.
bool SlicedOperation::compute(const SlicedCallPtr& sliced, bool recorded) {
    const std::optional<SlicePlan> plan = smallest_plan(*sliced);
    const Bytes nbytes = bytes_of_results();
    if (!plan || !session_.engine.has_room(nbytes + plan->workspace)) {
        return false;
    }
    // Small results stay in memory: to compute a loss again takes a pass over all scores.
    recorded = recorded && nbytes > session_.engine.budget / SMALL_SHARE;
    Recipe& recipe = recipe_for(sliced, *plan, recorded);
    const Ref<Call> kept(&recipe);
    std::vector<Ref<Storage>> made;
    for (const Geometry& each : sliced->slicing().results) {
        made.emplace_back(&new_record(recipe, each));
    }
    session_.storages.run(recipe, facts_.name.c_str());
    std::vector<at::Tensor> results;
    for (std::size_t i = 0; i < made.size(); ++i) {
        StorageRecord& record = record_of(*made[i]);
        results.push_back(sliced->slicing().results[i].in(record.at()));
        remember(record, *results.back().unsafeGetTensorImpl());
        record.suits_held_eviction =
            recorded && is_returnable(*results.back().unsafeGetTensorImpl());
    }
    for (const Ref<Storage>& each : made) {
        session_.frees.disown(record_of(*each));
    }
    give(results);
    return true;
}

Bytes SlicedOperation::bytes_read() const {
    Bytes total = 0;
    for (const Geometry& each : parsed_.signature->geometries) {
        total += each.nbytes();
    }
    return total;
}

// Return true if the result is large, and not much smaller than what the operator reads.
bool SlicedOperation::is_large() const {
    const Bytes nbytes = bytes_of_results();
    return nbytes > session_.engine.budget / LARGE_RESULT_SHARE && 2 * nbytes >= bytes_read();
}

// Return true if the result should not be in memory, although it has room: then whatever reads it
// next would have none.
bool SlicedOperation::defers_early() const {
    const Engine& engine = session_.engine;
    return is_large() && 2 * bytes_of_results() > engine.budget - engine.memory - engine.in_flight;
}

// Note the result as a value without room. Return false if it could not be computed in slices.
bool SlicedOperation::defer(const SlicedCallPtr& sliced) {
    const std::vector<Geometry>& geometries = sliced->slicing().results;
    if (geometries.size() != 1 || !is_dense(geometries[0])) {
        return false;
    }
    const std::optional<SlicePlan> plan = smallest_plan(*sliced);
    if (!plan) {
        return false;
    }
    Recipe& recipe = recipe_for(sliced, *plan, true);
    recipe.aside->is_given = true;
    const Ref<Call> kept(&recipe);
    StorageRecord& record = new_record(recipe, geometries[0]);
    const StoragePtr storage_impl = session_.registry.make_placeholder_of(record);
    const at::Tensor result = geometries[0].in(storage_impl);
    remember(record, *result.unsafeGetTensorImpl());
    record.suits_held_eviction = is_returnable(*result.unsafeGetTensorImpl());
    session_.storages.defer(recipe);
    give({&result, 1});
    return true;
}

// Return a new recipe by which `sliced` is computed. Sources that it reads stay in memory.
Recipe& SlicedOperation::recipe_for(
    const SlicedCallPtr& sliced, const SlicePlan& plan, bool replayable
) {
    Recipe& recipe = session_.storages.new_call(&facts_, cost_of(*sliced), replayable);
    recipe.signature = parsed_.signature;
    recipe.grad_mode = sliced->grad_mode;
    recipe.aside = std::make_unique<Recipe::Aside>();
    recipe.aside->sliced = sliced;
    recipe.aside->workspace = plan.workspace;
    recipe.has_workspace = plan.workspace != 0;
    std::vector<StorageRecord*> leaves;
    collect_leaves(*sliced, leaves);
    std::vector<Value*> values;
    for (StorageRecord* each : leaves) {
        values.push_back(&each->root);
        if (each->version.expected < 0) {
            each->version.look();
        }
        if (each->pinned || !each->replayable) {
            each->own();
        }
    }
    session_.engine.graph.reads(recipe, values);
    return recipe;
}

StorageRecord& SlicedOperation::new_record(Recipe& recipe, const Geometry& geometry) {
    const Bytes size = geometry.nbytes();
    StorageRecord& record = session_.storages.new_storage(recipe, session_.device.rounded(size));
    record.size = size;
    record.maker = &facts_;
    return record;
}

// Put the results in the place of the arguments.
void SlicedOperation::give(std::span<const at::Tensor> results) {
    torch::jit::Stack& stack = call_.stack();
    torch::jit::drop(stack, facts_.arguments);
    for (const at::Tensor& each : results) {
        stack.emplace_back(each);
    }
}

// Return `sliced` with its largest leaf computed in slices as well; null if that is impossible.
SlicedCallPtr SlicedOperation::with_fewer_leaves(const SlicedCallPtr& sliced, Locked& lock) const {
    std::vector<StorageRecord*> leaves;
    collect_leaves(*sliced, leaves);
    std::erase_if(leaves, [](const StorageRecord* each) { return !can_be_sliced(*each); });
    if (leaves.empty()) {
        return nullptr;
    }
    StorageRecord& leaf = **std::ranges::max_element(leaves, {}, &StorageRecord::nbytes);
    if (leaf.nbytes <= session_.engine.budget / LARGE_SHARE) {
        return nullptr;
    }
    const Ref<Storage> kept(&leaf);
    Recipe& recipe = recipe_of(*leaf.root.call);
    if (recipe.sliced()) {
        return short_enough(replaced(sliced, leaf, recipe.sliced()));
    }
    const Ref<Call> made_by(&recipe);
    const c10::intrusive_ptr<Signature> signature = recipe.signature;
    const std::vector<c10::IValue> unkeyed(
        recipe.unkeyed_args().begin(), recipe.unkeyed_args().end()
    );
    rekindle::find_slicing(session_, *signature, unkeyed, lock);
    // NOLINTNEXTLINE(bugprone-unchecked-optional-access): found by `find_slicing`
    const auto& results = signature->slicing->results;
    const bool usable = leaf.listed && leaf.replayable && recipe.linked && results.size() == 1 &&
                        is_dense(results[0]) && results[0].nbytes() == leaf.size;
    if (!usable) {
        return nullptr;
    }
    const auto node = c10::make_intrusive<SlicedCall>();
    node->signature = signature;
    node->unkeyed_args = unkeyed;
    node->grad_mode = recipe.grad_mode;
    for (std::size_t i = 0; i < recipe.n_inputs; ++i) {
        node->arguments.push_back(argument_of(record_of(*recipe.argument(i).storage)));
    }
    return short_enough(replaced(sliced, leaf, node));
}

// -- how an operator comes to run in slices -------------------------------------------------------

// Run the operator in slices if a value that it reads or makes has no room now. A value that is
// read in slices is not restored. Return false if the operator has not run.
bool Operation::run_in_slices_at_once() {
    SlicedOperation sliced(session_, facts_, call_, parsed_);
    // A result without a recipe cannot leave memory again. Before the first operator ran in slices,
    // the budget may suffice without any, so nothing is done that needs more memory.
    const bool stays = !recording_ && session_.slices && sliced.leaves_no_room(lock_);
    if (session_.has_sliced &&
        (sliced.reads_value_without_room() || sliced.has_no_room() || stays) &&
        run_in_slices(false)) {
        return true;
    }
    recording_ = recording_ || (stays && !parsed_.takes_over && sliced.merits_recipe());
    return false;
}

// Run the operator in slices, or note its result as a value without room. Return false, and change
// nothing, if neither is possible. observed: the learner knows of this operator already.
bool Operation::run_in_slices(bool observed) {
    SlicedOperation sliced(session_, facts_, call_, parsed_);
    if (!sliced.may()) {
        return false;
    }
    const bool takes_over = parsed_.takes_over;
    if (takes_over) {
        parsed_.leave_first();
        parsed_.signature = signature_of(call_, parsed_);
    }
    about_to_let_go(session_, lock_);
    const auto attempt = [&] {
        sliced.find_slicing(lock_);
        if (!sliced.has_slices()) {
            return false;
        }
        retry_evicting_held([&] { know_inputs(); });
        if (!observed) {
            register_tensor();
        }
        // what it reads may not be in memory thanks to slices
        needed_ = sliced.bytes_of_results() + sliced.bytes_read();
        if (foreign_ && !take_private_inputs()) {
            return false;
        }
        const bool recorded = recording_ || sliced.merits_recipe();
        return sliced.run(inputs_, recorded, grad_mode_, lock_);
    };
    const bool done = attempt();
    if (!done && takes_over) {
        parsed_.take_over();
        parsed_.signature = signature_of(call_, parsed_);
    }
    return done;
}

}  // namespace rekindle
