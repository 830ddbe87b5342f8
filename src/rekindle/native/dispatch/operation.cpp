#include "operation.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

#include "../memory/recipe.h"
#include "../ops/sizes.h"
#include "../ops/workspaces.h"
#include "../torch/geometry.h"
#include "../torch/homes.h"
#include "../torch/parts.h"
#include "../torch/versions.h"

namespace rekindle {

void Operation::run(const std::optional<c10::Stream>& now) {
    stream_ = driver_.about_to_run(now);
    invocation_.take(stack_);
    driver_.begins(*this);
    begun_ = true;
    invocation_.signature = signature_of(op_, invocation_, stack_);
    for (const std::uint32_t position : invocation_.written) {
        driver_.note_if_it_strays(*invocation_.tensors[position]);
    }
    const bool without_grad = driver_.any_time && driver_.any_time->records_without_grad();
    recording_ = (c10::GradMode::is_enabled() || facts_.differentiated || without_grad) &&
                 !invocation_.opaque && !facts_.opaque && driver_.never_recompute == 0 &&
                 !may_differ();
    if (driver_.let_go_of_everything) {
        let_go_for_tests();
    }
    if (driver_.any_time && driver_.any_time->open) {
        run_touching();
        return;
    }
    if (driver_.husks != 0) {
        bring_inputs();
    }
    run_with_inputs();
}

// What it reads is there.
void Operation::run_with_inputs() {
    if (!recording_ && may_only_count()) {
        only_count();
        return;
    }
    forget_history();
    or_lending([&] { know_inputs(); });
    if (facts_.opaque) {  // it may go on reading after it has returned
        keep_inputs_there();
    }
    meet();
    if (facts_.has(Traits::INDEXING) && recording_) {
        keep_indices();
    }
    or_lending([&] { save_what_is_overwritten(); });
    predict();
    if (foreign_ && recording_) {
        recording_ = take_private_inputs();
    }
    try {
        or_lending([&] { make_room(); });
    } catch (const Shortage&) {
        if (!guessed_) {
            throw;
        }
        needed_ = 0;  // all that may be evicted has been: a guess refuses nothing
    }
    driver_.refuse_for_tests(facts_.name.c_str());
    draw();
    own_inputs();
    call();
    register_results();
    make_good();
}

// It made more than anybody could know: others go for that.
void Operation::make_good() {
    if (driver_.engine.memory > driver_.engine.budget) {
        about_to_let_go(driver_, lock_);
        if (facts_.writes) {  // what is written is written: the next operator is refused
            driver_.clear(0);
            return;
        }
        try {
            or_without_copies(driver_, lock_, [&] { driver_.make_room(0, facts_.name.c_str()); });
        } catch (Shortage& shortage) {  // says what was made, and there is no room for
            shortage.needed = shortage.memory - shortage.budget;
            shortage.memory = shortage.budget;
            throw;
        }
    }
}

// -- what is only counted -------------------------------------------------------------------------

// Whether the bytes and the time of a call that is not recorded are all that matters. So it is
// unless it writes what recipes read or made, or reads what needs a second look. What it makes
// becomes a source when somebody reads it for a recipe, or saves it.
bool Operation::may_only_count() {
    const Signature& signature = *invocation_.signature;
    if (!signature.ordinary || !signature.priced || driver_.transcriber.writes()) {
        return false;
    }
    for (std::uint32_t i = 0; i < invocation_.tensors.size(); ++i) {
        const c10::TensorImpl& tensor = *invocation_.tensors[i];
        Driver::Resident* found =
            driver_.resident_at(*tensor.unsafe_storage().unsafeGetStorageImpl());
        Record* record = found == nullptr ? driver_.known(tensor) : found->record;
        if (record == nullptr) {
            continue;
        }
        if (record->flags != 0) {
            return false;
        }
        if (is_written(i)) {
            if (record->replayable || record->consumed()) {
                return false;
            }
            record->version.expected = -1;
        }
    }
    return true;
}

void Operation::only_count() {
    meet();
    needed_ = invocation_.signature->needed;
    inside_ = driver_.stepping ? 0 : invocation_.signature->workspace;
    if (!fits()) {
        or_lending([&] { driver_.make_room(needed_ + inside_, facts_.name.c_str()); });
    }
    if (driver_.reserved.limited()) {
        or_lending([&] { find_places(); });
    }
    driver_.refuse_for_tests(facts_.name.c_str());
    draw();
    const bool ordered = driver_.device.streams.are_several();
    if (ordered) {
        order_counted();
    }
    call();
    if (ordered) {
        note_writer();
    }
    Bytes made = 0;
    if (!facts_.returns_written) {
        each_memory(
            torch::jit::last(stack_, facts_.returns),
            [&](std::uint32_t, const at::Tensor& tensor, bool) {
                made += driver_.count(*tensor.storage().unsafeGetStorageImpl(), &facts_);
            }
        );
    }
    driver_.count(invocation_.signature->cost, made, invocation_.signature->workspace);
    make_good();
}

// What it reads, and writes, where there are several streams.
void Operation::order_counted() {
    for (std::uint32_t i = 0; i < invocation_.tensors.size(); ++i) {
        const c10::StorageImpl& home =
            *invocation_.tensors[i]->unsafe_storage().unsafeGetStorageImpl();
        const Driver::Resident* found = driver_.resident_at(home);
        if (found != nullptr && found->record != nullptr) {
            order(i, home, *found->record);
        }
    }
}

void Operation::order(std::uint32_t position, const c10::StorageImpl& home, Record& record) {
    driver_.device.about_to_read(home, record.order, stream_);
    if (is_written(position)) {
        driver_.device.about_to_write(record.order, stream_);
    }
}

// What it wrote in place was made on its stream.
void Operation::note_writer() {
    for (const std::uint32_t position : invocation_.written) {
        const Driver::Resident* found = driver_.resident_at(
            *invocation_.tensors[position]->unsafe_storage().unsafeGetStorageImpl()
        );
        if (found != nullptr && found->record != nullptr) {
            found->record->order = written(found->record->order);
        }
    }
}

// The order of what is where something else was, of which the memory goes on.
Order Operation::written(const Order& before) {
    Order after = driver_.device.streams.made_by(stream_);
    after.readers = before.readers;
    after.readers.add(stream_);
    after.kept_for = before.kept_for;
    after.again = before.again;
    return after;
}

// -- before the operator runs ---------------------------------------------------------------------

void Operation::forget_history() {
    if (driver_.storages_made > driver_.look_back_at) {
        driver_.forget_history();
        const auto known = static_cast<std::int64_t>(driver_.engine.n_storages());
        driver_.look_back_at =
            driver_.storages_made + std::max<std::int64_t>(driver_.longest_chain, known);
    }
}

void Operation::need(Need need) {
    needed_ = need.nbytes;
    guessed_ = !need.known;
}

void Operation::predict() {
    need({invocation_.signature->needed, !invocation_.signature->bound});
    if (needed_ < 0) {
        const auto given = torch::jit::last(stack_, facts_.arguments);
        {
            const Unlocked others(lock_);
            need(invocation_.signature->predict(given, invocation_.extras, driver_.device));
        }
        driver_.collect();
        if (facts_.dynamic) {  // never learned, but the bound stays
            invocation_.signature->needed = needed_;
            invocation_.signature->bound = guessed_;
        }
    }
    if (facts_.has(Traits::COUNTED_FIRST)) {
        const Need exact = bytes_of_dynamic(facts_, torch::jit::last(stack_, facts_.arguments));
        if (exact.nbytes != UNLIMITED) {
            need(exact);
        }
    }
}

bool Operation::fits() const {
    const Engine& engine = driver_.engine;
    const Bytes wanted = needed_ + inside_ + driver_.kept_back(needed_ + inside_);
    return wanted <= engine.budget - engine.memory - engine.in_flight;
}

// In one piece each: its results, and what it takes inside itself.
void Operation::find_places() {
    if (const auto& pieces = invocation_.signature->pieces) {
        for (const Bytes nbytes : *pieces) {
            driver_.reserved.find_place(nbytes);
        }
    } else {
        driver_.reserved.find_place(needed_);
    }
    driver_.reserved.find_place(inside_);
}

void Operation::make_room() {
    const Signature& signature = *invocation_.signature;
    inside_ = driver_.stepping ? 0 : signature.workspace;
    driver_.about_to_peak(needed_);
    if (!fits()) {
        if (facts_.dynamic) {
            const auto given = torch::jit::last(stack_, facts_.arguments);
            driver_.make_room(COUNT_BYTES, facts_.name.c_str());
            if (const Need better = bytes_of_dynamic(facts_, given); better.nbytes <= needed_) {
                need(better);
            }
        }
        driver_.make_room(needed_ + inside_, facts_.name.c_str());
    }
    if (driver_.reserved.limited()) {
        find_places();
    }
    if (signature.watched == 0 && !signature.priced && Watched::possible(driver_.device)) {
        driver_.clear(needed_ + guess_workspace(signature, driver_.device));
    }
}

// From where it draws, and where that stood (R5). On a device also for another try.
void Operation::draw() {
    if (!facts_.random || !(recording_ || driver_.device.queues())) {
        return;
    }
    Generators drawn;
    if (const at::Generator given = given_generator(invocation_.extras); given.defined()) {
        drawn.push_back(given);
    } else if (facts_.region) {
        drawn.push_back(default_generator(c10::DeviceType::CPU));
        if (driver_.device.queues()) {
            drawn.push_back(default_generator(driver_.device.which()));
        }
    } else {
        drawn.push_back(default_generator(where()));
    }
    for (const at::Generator& generator : drawn) {
        if (is_known(generator)) {
            random_.push_back(driver_.positions.note(generator));
        } else {
            recording_ = false;
        }
    }
}

// Where results are made: where that is asked for, else with the arguments. A number on the CPU may
// stand beside tensors of a device.
c10::Device Operation::where() const {
    if (facts_.device >= 0) {
        const auto given = torch::jit::last(stack_, facts_.arguments);
        const c10::IValue& asked_for = given[static_cast<std::size_t>(facts_.device)];
        if (asked_for.isDevice()) {
            return asked_for.toDevice();
        }
    }
    for (const c10::TensorImpl* tensor : invocation_.tensors) {
        if (!tensor->is_cpu()) {
            return tensor->device();
        }
    }
    return c10::DeviceType::CPU;
}

// -- afterwards -----------------------------------------------------------------------------------

// What it made: memory that nobody knew before.
Operation::Results Operation::gather_results() {
    Results results;
    each_memory(
        torch::jit::last(stack_, facts_.returns),
        [&](std::uint32_t position, const at::Tensor& tensor, bool all) {
            c10::StorageImpl* home = tensor.storage().unsafeGetStorageImpl();
            const auto same = [&](const Made& other) { return other.home == home; };
            const bool known = address_of(*home) == nullptr ||
                               driver_.resident_at(*home) != nullptr || has_moved(*home);
            if (known || std::ranges::any_of(results.made, same)) {
                return;
            }
            results.made.push_back({position, tensor.unsafeGetTensorImpl(), home});
            results.exotic = results.exotic || !all || !is_plain(*tensor.unsafeGetTensorImpl());
            results.quantized = results.quantized || tensor.is_quantized();
            if (!all) {
                results.parts.push_back(tensor);
            }
            results.foreign = results.foreign || !home->resizable();
            results.nbytes += driver_.counted(*home);
        }
    );
    return results;
}

// Tells the engine what the operator made, and how it can be made again.
void Operation::register_results() {
    const Results results = gather_results();
    const auto& [made, parts, nbytes, exotic, quantized, foreign] = results;
    c10::SmallVector<std::uint32_t, 4> positions;
    for (const Made& each : made) {
        positions.push_back(each.position);
    }
    Signature& signature = *invocation_.signature;
    if (!signature.fresh) {
        signature.learn(positions, nbytes, exotic);
        if (driver_.device.queues()) {  // else nobody asks for places
            signature.pieces.emplace();
            for (const Made& each : made) {
                signature.pieces->push_back(driver_.counted(*each.home));
            }
        }
    }
    Nanoseconds cost = signature.cost;
    recording_ = recording_ && inputs_can_be_had();
    if (!invocation_.written.empty()) {
        if (written_over(recording_, nbytes)) {
            cost = 0;  // the engine knows
        }
        // Results beside what was written: the call cannot be run again for them.
        recording_ = recording_ && facts_.has(Traits::STATISTICS);
        // NOLINTNEXTLINE(bugprone-unchecked-optional-access): learned by now
    } else if (!std::ranges::equal(positions, *signature.fresh)) {
        recording_ = false;  // not the same as last time: it does not depend on arguments alone
    }
    recording_ = recording_ && !exotic && !foreign;
    // It may go on reading its inputs: a quantized tensor has scales in them. What a sparse one is
    // made of is seen, and at any time brought back.
    if (driver_.any_time ? quantized : exotic) {
        keep_inputs_there();
    }
    if (!made.empty()) {
        register_made(made, cost);
    } else if (cost != 0) {
        driver_.account(facts_, cost, signature.workspace);
    }
    for (Record* record : owned_here_) {
        driver_.disown(*record);
    }
}

// Whether what it read can still be had when it runs again. Not what another thread wrote
// meanwhile, or handed out, if nobody else can ask for what was there.
bool Operation::inputs_can_be_had() const {
    return std::ranges::all_of(inputs_, [](const Ref<Storage>& each) {
        return each && each->listed && (each->resident || each->restorable());
    });
}

// Whether `home` is that of an input whose memory is elsewhere now, for the operator resized it.
bool Operation::has_moved(const c10::StorageImpl& home) {
    if (!facts_.resizes) {
        return false;
    }
    return std::ranges::any_of(invocation_.written, [&](auto position) {
        Record* record = input(position);
        return record != nullptr && record->at().get() == &home;
    });
}

void Operation::register_made(std::span<const Made> made, Nanoseconds cost) {
    Recipe& call = driver_.new_call(&facts_, cost, recording_);
    const Ref<Call> kept(&call);
    if (recording_) {
        link(call, !invocation_.written.empty());
    }
    for (const Made& each : made) {
        Record& record = driver_.new_storage(call, driver_.counted(*each.home));
        record.maker = &facts_;
        record.order = driver_.device.streams.made_by(stream_);
        record.flags = facts_.content;
        Driver::remember(record, *each.tensor);
        if (!invocation_.written.empty()) {
            // Perhaps of `out=`: autograd counts the write afterwards.
            record.version.expected = -1;
        }
        if (facts_.has(Traits::ROUTING) &&
            !c10::isFloatingType(c10::typeMetaToScalarType(each.tensor->dtype()))) {
            record.pinned = true;  // R8
        }
        const auto suitable = driver_.any_time ? &AnyTime::is_returnable : &is_returnable;
        record.returnable = recording_ && suitable(*each.tensor);
        driver_.settle_in(record, Home::reclaim_copy(each.home));
    }
    driver_.admit(call, invocation_.signature->workspace + stand_ins());
}

// Bytes of what stands in for running statistics when the call runs again.
Bytes Operation::stand_ins() {
    Bytes nbytes = 0;
    if (recording_ && facts_.written != 0) {
        for (const std::uint32_t position : invocation_.written) {
            nbytes += input(position)->nbytes;
        }
    }
    return nbytes;
}

// The values that were written are other values now (R3). A source that nothing was made from just
// stays a source. Handles of what was there mean what is there now: their own version counters tell
// whether they may (R7). When the call runs again it makes the `results` as well, which nobody
// wants then: so many bytes are part of its workspace. Returns whether the engine was told of a
// call.
bool Operation::written_over(bool recording, Bytes results) {
    c10::SmallVector<std::uint32_t, 2> replaced;
    c10::SmallVector<Record*, 2> changed;
    for (const std::uint32_t position : invocation_.written) {  // in order
        Record* record = input(position);
        if (record == nullptr || std::ranges::find(changed, record) != changed.end()) {
            continue;
        }
        changed.push_back(record);
        const bool fixed = std::ranges::find(fixed_, record) != fixed_.end();
        recording = recording && record->replayable;
        if (record->replayable || fixed) {
            replaced.push_back(position);
            continue;
        }
        record->version.expected = -1;
        record->order = written(record->order);
        if (facts_.resizes) {
            driver_.resized(*record);
        }
    }
    if (replaced.empty()) {
        return false;
    }
    Recipe& call = driver_.new_call(&facts_, invocation_.signature->cost, recording);
    const Ref<Call> kept(&call);
    if (recording) {
        link(call, false);
        call.aside->written.assign(replaced.begin(), replaced.end());
    }
    c10::SmallVector<Overwrite, 2> pairs;
    for (const std::uint32_t position : replaced) {
        Record& before = *input(position);
        Record& after = driver_.write_over(call, before);
        after.order = written(before.order);
        after.flags = facts_.content;
        after.maker = &facts_;
        pairs.push_back({&after.root, &before.root});
    }
    driver_.engine.graph.overwrites(call, {pairs.data(), pairs.size()});
    driver_.admit(call, invocation_.signature->workspace + results);
    if (facts_.resizes) {
        for (const Overwrite& pair : pairs) {
            driver_.resized(record_of(*pair.output->storage));
        }
    }
    return true;
}

// What a recipe reads must stay what it is. `statistics`: what was written is left out (R6).
void Operation::link(Recipe& call, bool statistics) {
    call.signature = invocation_.signature;
    call.grad_mode = c10::GradMode::is_enabled();
    if (!random_.empty() || !invocation_.extras.empty() || !invocation_.written.empty()) {
        call.aside = std::make_unique<Recipe::Aside>();
        call.aside->random = std::move(random_);
        call.aside->extras.assign(invocation_.extras.begin(), invocation_.extras.end());
        call.aside->statistics = statistics;
        if (statistics) {
            call.aside->written.assign(invocation_.written.begin(), invocation_.written.end());
        }
    }
    c10::SmallVector<Value*, 6> values;
    for (std::uint32_t i = 0; i < inputs_.size(); ++i) {
        if (statistics && is_written(i)) {
            continue;
        }
        Record& record = *input(i);
        values.push_back(&record.root);
        record.last_access = driver_.engine.clock;
        if (record.version.expected < 0) {
            record.version.look();
        }
    }
    driver_.engine.graph.reads(call, {values.data(), values.size()});
}

}  // namespace rekindle
