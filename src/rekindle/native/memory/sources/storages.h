// Records of the storages that operators make and write.
#pragma once

#include "../../engine/engine.h"
#include "../records/recipe.h"
#include "../records/storage_record.h"
#include "../registry/registry.h"
#include "../room/events.h"
#include "../room/frees.h"

namespace rekindle {

// Tells one budget's engine which operators ran, and makes the records of their results. The caller
// holds the session mutex.
class Storages final {
public:
    explicit Storages(Frees& frees)
        : engine_(frees.engine),
          registry_(frees.registry),
          observers_(frees.registry.observers),
          device_(frees.registry.device),
          events_(frees.events),
          frees_(frees) {}

    Storages(const Storages&) = delete;
    Storages& operator=(const Storages&) = delete;
    ~Storages() = default;

    // Start the budget: count the bytes that the device's allocator gave out before.
    void open();

    // -- operators ------------------------------------------------------------------------------

    // Create the engine's entry for an operator call. `facts` is null if no operator of the program
    // made the outputs. Without `replayable` the call is never repeated to recompute its outputs.
    Recipe& new_call(const Facts* facts, Nanoseconds cost, bool replayable);
    // Create the record of a storage that `call` allocates, or of the new version of a storage that
    // `call` writes in place.
    StorageRecord& new_storage(Call& call, Bytes nbytes);
    // Report to the engine that the operator call `call` has run, and that it used `workspace`
    // bytes internally.
    void admit(Recipe& call, Bytes workspace = 0);
    // Run `call`, whose results the program gets, for the first time: restore its inputs, make
    // room, compute. `who` names the operator in errors.
    void run(Recipe& call, const char* who);
    // Report to the engine the operator call `call`, whose result has no room and was not computed.
    void defer(Recipe& call);
    // Report to the engine the cost and the workspace of an operator that allocated no storage.
    void account(const Facts& facts, Nanoseconds cost, Bytes workspace);
    // Report to the engine that an operator ran whose results get no record. Their bytes count
    // against the budget, but they are never evicted.
    void count(Nanoseconds cost, Bytes nbytes, Bytes workspace);

    // -- records --------------------------------------------------------------------------------

    // Register the memory of `storage_impl` as a source (a storage without a recipe). `maker` is
    // the operator of the program that made it, or null.
    StorageRecord& make_source(
        const Facts* maker, const StoragePtr& storage_impl, const c10::TensorImpl* tensor
    );
    // Record that the operator call `call` writes the memory of `before` in place. Return the
    // record of the new version of the value. All saved-tensor handles then refer to the new
    // version.
    StorageRecord& record_inplace_write(Call& call, StorageRecord& before);
    // Record a write to the memory of `before` that no operator reports. The value of `before` has
    // a recipe. Return the record of the new version, which has no recipe, because the write cannot
    // be repeated.
    StorageRecord& record_external_write(StorageRecord& before);
    // Add a reference to `record`, such as one of autograd, and keep its memory alive by holding
    // `storage_impl`. `FreeQueue::released` removes the reference.
    void retain(StorageRecord& record, const StoragePtr& storage_impl);

private:
    void note_made(Recipe& call);

    Engine& engine_;
    Registry& registry_;
    Observers& observers_;
    Device& device_;
    Events& events_;
    Frees& frees_;
};

}  // namespace rekindle
