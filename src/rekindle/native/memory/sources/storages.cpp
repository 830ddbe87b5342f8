#include "storages.h"

#include <memory>

#include "../../engine/frame.h"

namespace rekindle {

void Storages::open() {
    if (device_.queues()) {
        Recipe& call = new_call(nullptr, 0, false);
        const Ref<Call> kept(&call);
        frees_.outside.count_in(new_storage(call, device_.allocated()));
        admit(call);
    }
}

Recipe& Storages::new_call(const Facts* facts, Nanoseconds cost, bool replayable) {
    observers_.due.places_due = observers_.due.notes_places;
    return registry_.records.make_call(engine_.graph, facts, cost, replayable);
}

StorageRecord& Storages::new_storage(Call& call, Bytes nbytes) {
    StorageRecord& made = registry_.records.make_storage(engine_.graph, nbytes);
    device_.streams.note(made.id, device_.streams.unknown());
    engine_.graph.makes(call, made);
    return made;
}

void Storages::admit(Recipe& call, Bytes workspace) {
    const Ref<Call> kept(&call);
    if (workspace != 0) [[unlikely]] {
        if (call.aside == nullptr) {
            call.aside = std::make_unique<Recipe::Aside>();
        }
        call.aside->workspace = workspace;
        call.has_workspace = true;
    }
    if (observers_.transcriber.writes()) [[unlikely]] {
        observers_.transcriber.called(call.name(), workspace);
    }
    events_.perform([&] { engine_.admit(call, true); });
    note_made(call);
}

void Storages::run(Recipe& call, const char* who) {
    const Ref<Call> kept(&call);
    if (observers_.transcriber.writes()) {
        observers_.transcriber.called(call.name(), call.aside ? call.aside->workspace : 0);
    }
    frees_.poll();
    // An event of another thread can end the engine's attempt.
    while (!call.ran) {
        frees_.recompute([&] { engine_.call(call, true); }, who);
    }
    note_made(call);
}

void Storages::defer(Recipe& call) {
    const Ref<Call> kept(&call);
    if (observers_.transcriber.writes()) {
        observers_.transcriber.called(call.name(), call.aside->workspace);
    }
    events_.perform([&] { engine_.defer(call); });
    note_made(call);
}

// Tell the observers that the program has the results of `call`.
void Storages::note_made(Recipe& call) {
    for (Value* value : call.outputs()) {
        if (value->storage->replayable || events_.swapper != nullptr) {
            registry_.held_list.add(record_of(*value->storage));
        }
    }
    if (observers_.steps != nullptr) {
        observers_.steps->made(call);
    }
    if (observers_.audit) [[unlikely]] {
        observers_.audit->made(call, device_);
    }
    events_.note_memory();
}

void Storages::account(const Facts& facts, Nanoseconds cost, Bytes workspace) {
    if (observers_.transcriber.writes()) {
        Recipe& call = new_call(&facts, cost, false);
        const Ref<Call> kept(&call);
        admit(call, workspace);
    } else {
        count(cost, 0, workspace);
    }
}

void Storages::count(Nanoseconds cost, Bytes nbytes, Bytes workspace) {
    engine_.account(cost, nbytes, workspace);
    events_.note_memory();
}

StorageRecord& Storages::make_source(
    const Facts* maker, const StoragePtr& storage_impl, const c10::TensorImpl* tensor
) {
    Recipe& call = new_call(maker, 0, false);
    const Ref<Call> kept(&call);
    StorageRecord& made = new_storage(call, registry_.devices.counted(*storage_impl));
    made.maker = maker;
    if (tensor != nullptr) {
        describe(made, *tensor);
    }
    registry_.bind(made, storage_impl);
    admit(call);
    return made;
}

StorageRecord& Storages::record_inplace_write(Call& call, StorageRecord& before) {
    StorageRecord& after = new_storage(call, before.nbytes);
    after.origin = before.origin;
    after.version.counter = before.version.counter;
    after.unwatched = before.unwatched;
    after.parameter = before.parameter;
    after.suits_held_eviction = before.suits_held_eviction;
    after.read_unseen = before.read_unseen;
    after.shares_version_counter = before.shares_version_counter;
    // The new version of the value follows this tensor from now on. `torch.utils.swap_tensors`
    // refuses a tensor to which several weak references exist, so drop the old one.
    before.origin = no_tensor();
    registry_.transfer(before, after);
    registry_.redirect(before, after);
    return after;
}

StorageRecord& Storages::record_external_write(StorageRecord& before) {
    Recipe& call = new_call(nullptr, 0, false);
    const Ref<Call> kept(&call);
    StorageRecord& after = record_inplace_write(call, before);
    const Overwrite pair{&after.root, &before.root};
    engine_.graph.overwrites(call, {&pair, 1});
    admit(call);
    return after;
}

void Storages::retain(StorageRecord& record, const StoragePtr& storage_impl) {
    if (!record.keeper && !record.placeholder) {
        record.keeper = storage_impl;
    }
    engine_.retain(record);
    hold(static_cast<Storage&>(record));
}

}  // namespace rekindle
