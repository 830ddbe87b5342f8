// An operator call of the program that has no room as a whole.
//
// NOTE [Values without room]
//
// If an operator does not fit into the budget, its result becomes a value without room: the program
// gets a tensor on an empty placeholder, as for an evicted value, and the recipe of the value is a
// `SlicedCall`. An operator that reads such a tensor runs in slices: it computes a slice of its
// argument, uses it, and computes the next. The result of that operator is either small enough to
// be in memory, or has no room itself, so that chains of such values arise. Scenario: the scores of
// a large vocabulary, their `log_softmax`, and the gradients of both are never in memory as a
// whole.
//
// A value without room is computed as a whole only if the program reads it otherwise, or if an
// operator reads it that does not run in slices. It then has to fit.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "../base/mutex.h"
#include "../memory/session.h"
#include "../memory/slices/plan.h"
#include "../memory/slices/sliced_call.h"
#include "../ops/operator_call.h"
#include "../ops/parsed_call.h"

namespace rekindle {

// Runs one call in slices. The caller holds the session mutex.
class SlicedOperation final {
public:
    SlicedOperation(Session& session, const Facts& facts, OperatorCall& call, ParsedCall& parsed)
        : session_(session), facts_(facts), call_(call), parsed_(parsed) {}

    SlicedOperation(const SlicedOperation&) = delete;
    SlicedOperation& operator=(const SlicedOperation&) = delete;
    SlicedOperation(SlicedOperation&&) = delete;
    SlicedOperation& operator=(SlicedOperation&&) = delete;

    ~SlicedOperation();

    // Return true if an argument is a value without room that does not fit without evictions.
    bool reads_value_without_room() const;
    // Return true if such calls can run in slices, and their results have no room now.
    bool has_no_room() const;
    // Return true if the result has room, but whatever reads it next would have none. Releases the
    // session mutex for a moment.
    bool leaves_no_room(Locked& lock);
    // Return true if the result is large, and a recipe of it keeps no large argument in memory that
    // was computed without one.
    bool merits_recipe() const;
    // Return true if nothing forbids that this call runs in slices.
    bool may() const;
    // Find out how such calls run in slices. Releases the session mutex for a moment.
    void find_slicing(Locked& lock);
    // Return true if such calls can run in slices.
    bool has_slices() const;
    Bytes bytes_of_results() const;
    Bytes bytes_read() const;
    // Run the call, or note its result as a value without room. Return false, and change nothing,
    // if neither is possible. inputs: the records of the tensor arguments. recorded: results in
    // memory get a recipe.
    bool run(std::span<const Ref<Storage>> inputs, bool recorded, bool grad_mode, Locked& lock);

private:
    SlicedCallPtr sliced_call(std::span<const Ref<Storage>> inputs, bool grad_mode) const;
    template <class F>
    bool with_leaves(SlicedCallPtr sliced, Locked& lock, F&& attempt);
    void retain_leaves(const SlicedCall& sliced);
    bool compute(const SlicedCallPtr& sliced, bool recorded);
    std::optional<SlicePlan> smallest_plan(const SlicedCall& sliced) const;
    bool is_large() const;
    bool defers_early() const;
    bool defer(const SlicedCallPtr& sliced);
    Recipe& recipe_for(const SlicedCallPtr& sliced, const SlicePlan& plan, bool replayable);
    StorageRecord& new_record(Recipe& recipe, const Geometry& geometry);
    void give(std::span<const at::Tensor> results);
    SlicedCallPtr with_fewer_leaves(const SlicedCallPtr& sliced, Locked& lock) const;

    Session& session_;
    const Facts& facts_;
    OperatorCall& call_;
    ParsedCall& parsed_;
    std::vector<StorageRecord*> retained_;  // leaves of calls that the graph may not know of yet
};

}  // namespace rekindle
