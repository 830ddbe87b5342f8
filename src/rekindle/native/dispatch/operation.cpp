// The main steps of an operator call within a budget, and the registration of its results. The note
// in dispatch/runtime.cpp lists all stages of an operator.
#include "operation.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

#include "../memory/records/recipe.h"
#include "../memory/room/swapper.h"
#include "../ops/sizes.h"
#include "../ops/slicing.h"
#include "../ops/workspaces.h"
#include "../torch/arguments.h"
#include "../torch/geometry.h"
#include "../torch/parts.h"
#include "../torch/storage_ptr.h"
#include "../torch/versions.h"
#include "counted_call.h"
#include "in_place.h"
#include "trial.h"

namespace rekindle {

namespace {

// Return the bytes of the memory that `reader` uses.
Bytes bytes_read(const Reader& reader, Session& session) {
    StorageList storages;
    reader.note_read(storages);
    std::ranges::sort(storages);
    const auto repeated = std::ranges::unique(storages);
    Bytes total = 0;
    for (const auto* each = storages.begin(); each != repeated.begin(); ++each) {
        total += session.registry.devices.counted(**each);
    }
    return total;
}

// Discard copies on the host that an operator of another library may make outdated, because it may
// write without saying so: a compiled region its operands, an operator that is not trusted any
// memory.
void discard_copies(
    Events& events, const Facts& facts, bool trusted, std::span<const Ref<Storage>> inputs
) {
    if ((facts.talks || facts.has(Traits::TRIED)) && !trusted) {
        events.about_to_write_anything();
    } else if (facts.region) {
        for (const Ref<Storage>& each : inputs) {
            if (each) {
                events.about_to_write(record_of(*each));
            }
        }
    }
}

// Return true if the operator is opaque only because it may resize its argument `out=`, and values
// without a recipe may be moved. Such an operator reads nothing after it has returned.
bool only_resizes_its_result(const Session& session, const Facts& facts) {
    return session.held.eviction && session.held.eviction->moves() && facts.is_aten &&
           facts.resizes && facts.returns_written && !facts.talks && !facts.has(Traits::OPAQUE);
}

// Record which streams wrote and read `after`, the new version of the value `before` in the same
// memory. Streams that read `before` count as readers of `after` too, so that a later free of the
// memory waits for them.
void note_written(
    Session& session, StreamIndex stream, const StorageRecord& before, const StorageRecord& after
) {
    Streams& streams = session.device.streams;
    if (!streams.has_order(before.id)) {
        return;
    }
    const Order last = streams.order_of(before.id);
    Order order = streams.made_by(stream);
    order.readers = last.readers;
    order.readers.add(stream);
    order.kept_for = last.kept_for;
    order.again = last.again;
    streams.note(after.id, order);
}

}  // namespace

void Operation::run(const std::optional<c10::Stream>& now) {
    stream_ = session_.frees.about_to_run(now);
    call_.parse(parsed_);
    if (facts_.in_place != nullptr && !grad_mode_) {
        decide_in_place();
    }
    session_.held.begins(*this);
    begun_ = true;
    parsed_.signature = signature_of(call_, parsed_);
    for (const std::uint32_t position : parsed_.written) {
        session_.sources.note_shared_version_counter(*parsed_.tensors[position]);
    }
    if (!facts_.is_aten && facts_.writes) [[unlikely]] {
        expect_raised_versions();
    }
    // Record a recipe only if the results may be needed again, and if a recomputation gives the
    // same bits. With grad mode off autograd needs no recipe, but user-held values may need one.
    const bool without_grad =
        session_.held.eviction && session_.held.eviction->records_without_grad();
    const bool differentiated = facts_.differentiated || facts_.unit;
    recording_ = (grad_mode_ || differentiated || without_grad) && !parsed_.opaque &&
                 !facts_.opaque && session_.never_recompute == 0 &&
                 !session_.events.only_counting.on() && (!may_differ() || is_trusted_or_tried());
    try {
        run_as_it_may();
    } catch (OutOfBudgetError& shortage) {
        shortage.operands = bytes_read(*this, session_);
        throw;
    }
    if (facts_.unit) [[unlikely]] {
        note_unit(parsed_.signature->probation);
    }
}

void Operation::run_as_it_may() {
    if (session_.events.tests.evict_before_every_op) [[unlikely]] {
        evict_for_tests(session_, lock_);
    }
    const bool touching = session_.held.eviction && session_.held.eviction->open;
    const bool may_have_no_room =
        session_.registry.placeholders != 0 ||
        (session_.has_sliced && parsed_.signature->slicing) ||
        (session_.slices && !recording_ && is_any_large(parsed_.tensors, session_.engine.budget));
    if (!may_have_no_room || !run_in_slices_at_once()) [[likely]] {
        const std::optional<OutOfBudgetError> shortage =
            out_of_budget_of([&] { touching ? run_pinned() : run_whole(); });
        if (shortage && (started_ || !run_in_slices(true))) [[unlikely]] {
            throw OutOfBudgetError(*shortage);
        }
    }
    if (touching) [[unlikely]] {
        session_.held.eviction->look_at_sources(lock_);
        let_results_return();
    }
}

// Decide whether a backward operator writes its result over its incoming gradient; see
// dispatch/in_place.h.
void Operation::decide_in_place() {
    const TakesOver what = takes_over(session_, facts_, call_);
    would_take_over_ = what == TakesOver::without_modes;
    if (what == TakesOver::yes) {
        parsed_.take_over();
        ++session_.taking_over.taken_over;
    }
}

// Run the operator. All its inputs are in memory.
void Operation::run_with_inputs() {
    // Fast path without recipe and records, for example for optimizer steps and evaluation.
    if (!recording_ && may_only_count()) {
        only_count();
        return;
    }
    prune_history();
    retry_evicting_held([&] { know_inputs(); });
    if (!facts_.is_aten) [[unlikely]] {
        const bool trusted = parsed_.signature->probation.is_trusted();
        discard_copies(session_.events, facts_, trusted, {inputs_.data(), inputs_.size()});
    }
    // An opaque operator may read its inputs after it has returned, so do not evict them while the
    // program holds them.
    if (facts_.opaque && !only_resizes_its_result(session_, facts_)) [[unlikely]] {
        keep_inputs_there();
    }
    register_tensor();
    if (facts_.has(Traits::INDEXING) && recording_) [[unlikely]] {
        keep_indices();
    }
    retry_evicting_held([&] { save_what_is_overwritten(); });
    predict();
    if (foreign_ && recording_) [[unlikely]] {
        retry_evicting_held([&] { recording_ = take_private_inputs(); });
    }
    try {
        retry_evicting_held([&] { make_room(); });
    } catch (OutOfBudgetError& shortage) {
        if (!guessed_) {
            shortage.inside = inside_;
            throw;
        }
        // No candidate for eviction is left. Run the operator anyway: `needed_` is only an upper
        // bound of the bytes of its results, so they may fit.
        needed_ = 0;
    }
    session_.room.refuse_for_tests(facts_.name.c_str());
    draw();
    hold_sources();
    const bool is_tried = facts_.has(Traits::TRIED);
    if (is_tried) [[unlikely]] {
        look_for_effects();
    }
    call();
    if (tried_ || is_tried) [[unlikely]] {
        stand_trial();
    }
    register_results();
    enforce_budget();
}

// If the operator made more bytes than predicted, evict values until memory is within the budget
// again.
void Operation::enforce_budget() {
    if (session_.engine.memory > session_.engine.budget) [[unlikely]] {
        about_to_let_go(session_, lock_);
        // If the operator has overwritten memory, it cannot be undone. So do not raise here: the
        // next operator raises `OutOfBudget` instead.
        if (facts_.writes) {
            session_.room.clear(0);
            return;
        }
        try {
            or_without_copies(session_.frees, lock_, [&] {
                session_.room.make_room(0, facts_.name.c_str());
            });
        } catch (OutOfBudgetError& shortage) {
            // In the error, name the bytes that the operator has really made instead of the
            // predicted bytes.
            shortage.needed = shortage.memory - shortage.budget;
            shortage.memory = shortage.budget;
            throw;
        }
    }
    if (session_.events.swapper != nullptr) [[unlikely]] {
        swap_ahead();
    }
}

// -- operators that are only counted --------------------------------------------------------------

// Return true if a call without a recipe needs no storage records either, so that only its bytes
// and cost are counted. Return false if the call writes memory that has a recipe or that recipes
// read, or if it reads contents that no operator wrote. Results that are only counted become
// sources (values without a recipe) when a recipe reads them or autograd saves them.
bool Operation::may_only_count() {
    const Signature& signature = *parsed_.signature;
    const bool moves = session_.held.eviction && session_.held.eviction->moves();
    if (!signature.ordinary || !signature.priced || session_.observers.transcriber.writes() ||
        moves) {
        return false;
    }
    // Position of the next tensor that the operator writes. An optimizer step writes hundreds, so a
    // search for each would be slow.
    const std::uint32_t* written = parsed_.written.begin();
    for (std::uint32_t i = 0; i < parsed_.tensors.size(); ++i) {
        const bool is_written = written != parsed_.written.end() && *written == i;
        written += is_written ? 1 : 0;
        if (!count_argument(session_, lock_, *parsed_.tensors[i], is_written)) {
            return false;
        }
    }
    return true;
}

// Run an operator whose results count against the budget but get no record.
void Operation::only_count() {
    register_tensor();
    needed_ = parsed_.signature->needed;
    inside_ = session_.room.reserves_for_operators() ? parsed_.signature->workspace : 0;
    if (!fits()) [[unlikely]] {
        retry_evicting_held([&] {
            session_.room.make_room(needed_ + inside_, facts_.name.c_str());
        });
    }
    if (session_.room.reserved.limited()) [[unlikely]] {
        retry_evicting_held([&] { find_places(); });
    }
    session_.room.refuse_for_tests(facts_.name.c_str());
    draw();
    const bool ordered = session_.device.streams.are_several();
    if (ordered) [[unlikely]] {
        order_counted();
    }
    if (facts_.has(Traits::TRIED)) [[unlikely]] {
        look_for_effects();
    }
    call();
    if (ordered) {
        note_writer();
    }
    const Bytes made = facts_.returns_written ? 0 : count_results(session_, facts_, returned());
    session_.storages.count(parsed_.signature->cost, made, parsed_.signature->workspace);
    if (session_.events.swapper != nullptr) [[unlikely]] {
        swap_ahead();
    }
    enforce_budget();
}

// Let the stream of the call wait for earlier accesses to its operands on other streams.
void Operation::order_counted() {
    for (std::uint32_t i = 0; i < parsed_.tensors.size(); ++i) {
        const c10::StorageImpl& storage_impl =
            *parsed_.tensors[i]->unsafe_storage().unsafeGetStorageImpl();
        if (StorageRecord* record = session_.registry.find_record(storage_impl)) {
            order(i, storage_impl, *record);
        }
    }
}

// Let the stream of this operator wait for earlier accesses to its operand `record` on other
// streams.
void Operation::order(
    std::uint32_t position, const c10::StorageImpl& storage_impl, StorageRecord& record
) {
    session_.device.about_to_read(storage_impl, record.id, stream_);
    if (is_written(position)) {
        session_.device.about_to_write(record.id, stream_);
    }
}

// Record that the stream of this operator was the last to write the operands that it writes in
// place.
void Operation::note_writer() {
    for (const std::uint32_t position : parsed_.written) {
        StorageRecord* record = session_.registry.find_record(*parsed_.tensors[position]);
        if (record != nullptr) {
            note_written(session_, stream_, *record, *record);
        }
    }
}

// -- before the operator runs ---------------------------------------------------------------------

// Shorten long chains of recipes, whenever about as many new storages were made as the engine's
// graph contains.
void Operation::prune_history() {
    if (session_.registry.records.storages_made > session_.history.next_check) {
        session_.history.prune();
        const auto known = static_cast<std::int64_t>(session_.engine.n_storages());
        session_.history.next_check = session_.registry.records.storages_made +
                                      std::max<std::int64_t>(session_.history.longest_chain, known);
    }
}

// Store `need`, the predicted bytes of the operator's results.
void Operation::need(Need need) {
    needed_ = need.nbytes;
    guessed_ = !need.known;
}

// Predict the bytes of the operator's results: from the call's signature if an earlier call
// measured them, else from the arguments.
void Operation::predict() {
    need({parsed_.signature->needed, !parsed_.signature->bound});
    if (needed_ < 0 && fits_in_any_case()) {
        return;
    }
    if (needed_ < 0) {
        const auto given = boxed_arguments();
        {
            const Unlocked others(lock_);
            need(parsed_.signature->predict(given, parsed_.unkeyed_args, session_.device));
        }
        session_.registry.drain();
        // If sizes of results depend on contents of the arguments, the signature stores this upper
        // bound: sizes measured in one call would not hold for the next.
        if (facts_.dynamic) {
            parsed_.signature->needed = needed_;
            parsed_.signature->bound = guessed_;
        }
    }
    if (facts_.has(Traits::COUNTED_FIRST)) {
        const Need exact = bytes_of_dynamic(facts_, boxed_arguments());
        if (exact.nbytes != UNLIMITED) {
            need(exact);
        }
    }
}

// Return true if the results of a first call fit without evicting anything, whatever their sizes
// are. Then set `needed_` to an upper bound: a meta kernel would take longer than most operators.
bool Operation::fits_in_any_case() {
    // After a device OOM, `rescue` needs the exact bytes.
    if (foreign_ || parsed_.opaque || session_.device.queues()) {
        return false;
    }
    const bool unlimited = session_.engine.budget == UNLIMITED;
    const auto given = boxed_arguments();
    const Bytes most = unlimited ? 0 : most_bytes(*parsed_.signature, given);
    // The workspace, which is unknown as well, is guessed from the size of the results.
    needed_ = 4 * most;
    if (most < 0 || !fits()) {
        needed_ = -1;
        return false;
    }
    need({most, false});
    bounded_ = !unlimited;
    return true;
}

// Find free blocks on the device for each result and for the operator's workspace.
void Operation::find_places() {
    if (const auto& pieces = parsed_.signature->pieces) {
        for (const Bytes nbytes : *pieces) {
            session_.room.reserved.find_place(nbytes);
        }
    } else {
        session_.room.reserved.find_place(needed_);
    }
    session_.room.reserved.find_place(inside_);
}

// Evict values until the results and the workspace of this operator fit. A workspace that was not
// measured yet is estimated, if this call will measure it.
void Operation::make_room() {
    Signature& signature = *parsed_.signature;
    inside_ = session_.room.reserves_for_operators() ? signature.workspace : 0;
    session_.frees.about_to_peak(needed_);
    if (!fits()) [[unlikely]] {
        if (facts_.dynamic) {
            const auto given = boxed_arguments();
            session_.room.make_room(COUNT_BYTES, facts_.name.c_str());
            if (const Need better = bytes_of_dynamic(facts_, given); better.nbytes <= needed_) {
                need(better);
            }
        }
        session_.room.make_room(needed_ + inside_, facts_.name.c_str());
    }
    if (session_.room.reserved.limited()) [[unlikely]] {
        find_places();
    }
    if (signature.watched == 0 && !signature.priced && WorkspaceProbe::possible(session_.device)) {
        session_.room.clear(guess_need(signature, needed_, session_.device));
    }
}

// Record the states of the random generators that the operator draws from, for recomputations (R5,
// randomness). On a device they are also used to repeat the operator after a device OOM.
void Operation::draw() {
    if (!facts_.random || !(recording_ || session_.device.queues())) [[likely]] {
        return;
    }
    Generators drawn;
    const bool is_tried = facts_.has(Traits::TRIED);
    const at::Generator given = given_generator(parsed_.unkeyed_args);
    if (given.defined()) {
        drawn.push_back(given);
    }
    if (facts_.region || is_tried) {
        drawn.push_back(default_generator(c10::DeviceType::CPU));
        if (session_.device.queues()) {
            drawn.push_back(default_generator(session_.device.which()));
        }
    } else if (!given.defined()) {
        drawn.push_back(default_generator(where()));
    }
    for (const at::Generator& generator : drawn) {
        if (is_tried && &generator != drawn.begin() && generator == drawn[0]) {
            continue;  // the argument is the default generator
        }
        if (is_known(generator)) {
            rare().random.push_back(session_.positions.note(generator));
            if (is_tried && generator.device().is_cpu()) {
                rare().before.push_back(std::make_unique<Random>(generator));
            }
        } else {
            recording_ = false;
        }
    }
}

// Return the device of the operator's results: the one that an argument names, else the device of
// the tensor arguments. A CPU tensor decides only if no argument is on another device, because it
// may be a single number.
c10::Device Operation::where() const {
    if (facts_.device >= 0) {
        const auto given = boxed_arguments();
        const c10::IValue& asked_for = given[static_cast<std::size_t>(facts_.device)];
        if (asked_for.isDevice()) {
            return asked_for.toDevice();
        }
    }
    for (const c10::TensorImpl* tensor : parsed_.tensors) {
        if (!tensor->is_cpu()) {
            return tensor->device();
        }
    }
    return c10::DeviceType::CPU;
}

// -- after the operator has run -------------------------------------------------------------------

// Return the results in newly allocated memory: those whose storages are not in the address table
// yet.
Operation::Results Operation::gather_results() {
    Results results;
    each_memory(returned(), [&](std::uint32_t position, const at::Tensor& tensor, bool all) {
        c10::StorageImpl* storage_impl = tensor.storage().unsafeGetStorageImpl();
        const auto same = [&](const Made& other) { return other.storage_impl == storage_impl; };
        const bool known = address_of(*storage_impl) == nullptr ||
                           session_.registry.find(*storage_impl) != nullptr ||
                           has_moved(*storage_impl);
        if (known || std::ranges::any_of(results.made, same)) {
            return;
        }
        results.made.push_back({position, tensor.unsafeGetTensorImpl(), storage_impl});
        results.non_strided_result =
            results.non_strided_result || !all || !is_plain(*tensor.unsafeGetTensorImpl());
        results.quantized = results.quantized || tensor.is_quantized();
        if (!all) {
            results.parts.push_back(tensor);
        }
        results.external = results.external || !storage_impl->resizable();
        results.nbytes += session_.registry.devices.counted(*storage_impl);
    });
    return results;
}

// Report to the engine the storages that the operator made, and record how to recompute them.
void Operation::register_results() {
    const Results results = gather_results();
    const auto& [made, parts, nbytes, non_strided_result, quantized, external] = results;
    TestHooks::underestimated += bounded_ && nbytes > needed_ ? 1 : 0;
    c10::SmallVector<std::uint32_t, 4> positions;
    for (const Made& each : made) {
        positions.push_back(each.position);
    }
    Signature& signature = *parsed_.signature;
    if (!signature.fresh) [[unlikely]] {
        signature.learn(positions, nbytes, non_strided_result);
        // Store the sizes of the single results only on a device that queues its work: only
        // `find_places` reads them.
        if (session_.device.queues()) {
            signature.pieces.emplace();
            for (const Made& each : made) {
                signature.pieces->push_back(session_.registry.devices.counted(*each.storage_impl));
            }
        }
    }
    Nanoseconds cost = signature.cost;
    recording_ = recording_ && inputs_can_be_had();
    own_sources();
    if (!parsed_.written.empty()) {
        if (written_over(recording_, nbytes)) {
            cost = 0;  // `written_over` has reported the cost to the engine
        }
        // The operator wrote in place and also returned new results. A recomputation cannot do
        // both, except if the written tensors are running statistics.
        recording_ = recording_ && facts_.has(Traits::STATISTICS);
        // NOLINTNEXTLINE(bugprone-unchecked-optional-access): learned by now
    } else if (!std::ranges::equal(positions, *signature.fresh)) {
        // The operator made other results than its last call with this signature. So its results
        // depend on more than the arguments, and a recomputation could differ.
        recording_ = false;
    }
    recording_ = recording_ && !non_strided_result && !external;
    if (external) [[unlikely]] {
        for (const Made& each : made) {
            session_.sources.share_with_overlapping(*each.storage_impl);
        }
    }
    // Keep inputs in memory that a result refers to. A quantized tensor refers to its scales, and a
    // sparse tensor consists of its inputs. With `evict="anything"` the runtime sees the parts of a
    // sparse tensor and restores them as needed.
    if (session_.held.eviction ? quantized : non_strided_result) {
        keep_inputs_there();
    }
    // If the result was written over the first argument, only the result still refers to this
    // memory.
    if (parsed_.takes_over) {
        const at::Tensor& result = returned()[0].toTensor();
        remember(current(*input(0)), *result.unsafeGetTensorImpl());
    }
    if (!made.empty()) {
        register_made(made, cost);
    } else if (cost != 0) {
        session_.storages.account(facts_, cost, signature.workspace);
    }
    let_go_of_sources();
}

// Return true if every input is in memory or can be restored. An input is lost if, while the
// operator ran, another thread wrote it or passed its address to other code.
bool Operation::inputs_can_be_had() const {
    return std::ranges::all_of(inputs_, [](const Ref<Storage>& each) {
        return each && each->listed && (each->resident || each->restorable());
    });
}

// Return true if the operator resized `storage_impl`, the storage of one of its inputs.
bool Operation::has_moved(const c10::StorageImpl& storage_impl) {
    if (!facts_.resizes) {
        return false;
    }
    return std::ranges::any_of(parsed_.written, [&](auto position) {
        StorageRecord* record = input(position);
        return record != nullptr && record->at().get() == &storage_impl;
    });
}

// Create the records of `made`, the new results of the operator; with a recipe if `recording_`.
void Operation::register_made(std::span<const Made> made, Nanoseconds cost) {
    Recipe& call = session_.storages.new_call(&facts_, cost, recording_);
    const Ref<Call> kept(&call);
    if (recording_) {
        link(call, !parsed_.written.empty(), false);
    }
    for (const Made& each : made) {
        StorageRecord& record = session_.storages.new_storage(
            call, session_.registry.devices.counted(*each.storage_impl)
        );
        record.maker = &facts_;
        session_.device.streams.note(record.id, session_.device.streams.made_by(stream_));
        record.flags = facts_.content & (UNWRITTEN | ZEROED);
        remember(record, *each.tensor);
        if (!parsed_.written.empty()) {
            // The program may have passed this result as `out=`. Then autograd bumps its version
            // counter afterwards, which is not a write.
            record.version.expected = -1;
        }
        if (facts_.has(Traits::ROUTING) &&
            !c10::isFloatingType(c10::typeMetaToScalarType(each.tensor->dtype()))) {
            record.pinned = true;  // values that decide a shape are never recomputed (R8, routing)
        }
        const auto suitable =
            session_.held.eviction ? &HeldEviction::is_returnable : &is_returnable;
        record.suits_held_eviction = recording_ && suitable(*each.tensor);
        session_.registry.bind(record, StoragePtr::reclaim_copy(each.storage_impl));
    }
    if (would_take_over_ && inputs_[0]) [[unlikely]] {
        session_.observers.transcriber.would_take_over(input(0)->id);
    }
    // A recomputation passes scratch tensors to the operator in place of the running statistics.
    Bytes scratch = 0;
    if (recording_ && facts_.has(Traits::STATISTICS)) {
        for (const std::uint32_t position : parsed_.written) {
            const Geometry& statistic = parsed_.signature->geometries[position];
            scratch += needs_scratch(*parsed_.signature, statistic) ? input(position)->nbytes : 0;
        }
    }
    session_.storages.admit(call, parsed_.signature->workspace + scratch);
}

// Look up the records of the memory that the operator wrote. Return true if another thread has
// written the same memory while the operator ran. The order of both writes is unknown, so they
// cannot be repeated.
bool Operation::look_up_written() {
    bool raced = false;
    for (const std::uint32_t position : parsed_.written) {
        if (inputs_[position] && input(position)->successor) {
            inputs_[position] = Ref<Storage>(&current(*input(position)));
            raced = true;
        }
    }
    return raced;
}

// Register new versions of the values that the operator wrote in place (R3, in-place writes). A
// source (a value without a recipe) that no recipe reads keeps its record. Saved-tensor handles of
// an old version then refer to the new one; the version check of each handle decides whether
// unpacking raises (R7, version check). A recomputation also makes the operator's results again:
// `results` bytes that nothing needs, so they count as its workspace. Return true if a call was
// recorded.
bool Operation::written_over(bool recording, Bytes results) {
    c10::SmallVector<std::uint32_t, 2> replaced;
    c10::SmallVector<StorageRecord*, 2> changed;
    recording = !look_up_written() && recording;
    // Positions of the arguments that the operator wrote, ascending.
    for (const std::uint32_t position : parsed_.written) {
        StorageRecord* record = input(position);
        if (record == nullptr || std::ranges::find(changed, record) != changed.end()) {
            continue;
        }
        changed.push_back(record);
        const bool fixed = rare_ && std::ranges::find(rare_->fixed, record) != rare_->fixed.end();
        recording = recording && record->replayable;
        if (record->replayable || fixed) {
            replaced.push_back(position);
            continue;
        }
        record->clear_flags();
        record->version.expected = -1;
        note_written(session_, stream_, *record, *record);
        if (facts_.resizes) {
            session_.frees.resized(*record);
        }
    }
    if (replaced.empty()) {
        return false;
    }
    const bool first_is_last = recording && is_first_write();
    for (const std::uint32_t position : replaced) {
        recording = recording && note_written_bytes(position);
    }
    Recipe& call = session_.storages.new_call(&facts_, parsed_.signature->cost, recording);
    const Ref<Call> kept(&call);
    if (recording) {
        link(call, false, first_is_last);
        call.aside->written.assign(replaced.begin(), replaced.end());
    }
    c10::SmallVector<Overwrite, 2> pairs;
    for (const std::uint32_t position : replaced) {
        StorageRecord& before = *input(position);
        StorageRecord& after = session_.storages.record_inplace_write(call, before);
        note_written(session_, stream_, before, after);
        after.flags = facts_.content & (UNWRITTEN | ZEROED);
        if (recording) {
            after.take_unwritten(before);
        }
        after.maker = &facts_;
        pairs.push_back({&after.root, &before.root});
    }
    session_.engine.graph.overwrites(call, {pairs.data(), pairs.size()});
    session_.storages.admit(call, parsed_.signature->workspace + results);
    if (facts_.resizes) {
        for (const Overwrite& pair : pairs) {
            session_.frees.resized(record_of(*pair.output->storage));
        }
    }
    return true;
}

// Fill in the recipe `call`, and note the versions of its inputs. statistics: the written tensors
// are running statistics, which a recomputation does not update (R6, hidden writes). first_is_last:
// a recomputation restores the first argument after the others.
void Operation::link(Recipe& call, bool statistics, bool first_is_last) {
    call.signature = parsed_.signature;
    call.grad_mode = grad_mode_;
    const bool needs_more =
        !random().empty() || !parsed_.unkeyed_args.empty() || !parsed_.written.empty();
    if (needs_more) {
        call.aside = std::make_unique<Recipe::Aside>();
        if (rare_) {
            call.aside->random = std::move(rare_->random);
        }
        call.aside->unkeyed_args.assign(parsed_.unkeyed_args.begin(), parsed_.unkeyed_args.end());
        call.aside->statistics = statistics;
        call.aside->first_is_last = first_is_last;
        if (statistics) {
            call.aside->written.assign(parsed_.written.begin(), parsed_.written.end());
        }
    }
    c10::SmallVector<Value*, 6> values;
    for (std::uint32_t i = 0; i < inputs_.size(); ++i) {
        if (statistics && is_written(i)) [[unlikely]] {
            continue;
        }
        StorageRecord& record = *input(i);
        values.push_back(&record.root);
        record.last_access = session_.engine.clock;
        if (record.version.expected < 0) {
            record.version.look();
        }
    }
    if (first_is_last) {
        std::ranges::rotate(values, values.begin() + 1);
    }
    session_.engine.graph.reads(call, {values.data(), values.size()});
}

}  // namespace rekindle
