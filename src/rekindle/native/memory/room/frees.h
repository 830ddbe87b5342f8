// Tells the engine what the program freed.
//
// PyTorch frees storages at any time. The registry notes that, and `Frees` reports it to the engine
// between two events.
#pragma once

#include <c10/core/Stream.h>

#include <optional>

#include "../../engine/engine.h"
#include "../registry/registry.h"
#include "events.h"
#include "outside_memory.h"

namespace rekindle {

// Reports frees of one budget. The caller holds the session mutex.
class Frees final {
public:
    Frees(Engine& engine_of, Registry& registry_of, Events& events_of)
        : engine(engine_of),
          registry(registry_of),
          events(events_of),
          outside(engine_of, registry_of.device) {}

    Frees(const Frees&) = delete;
    Frees& operator=(const Frees&) = delete;

    // The engine is destroyed next. Until then nothing may refer to its storages.
    ~Frees() { registry.close(); }

    // what this part is built on
    Engine& engine;
    Registry& registry;
    Events& events;

    OutsideMemory outside;

    // Process everything that happened since the last call: saved-tensor handles that autograd
    // destroyed, and memory that the program freed.
    void process_pending();

    void process_pending_if_needed() {
        if (registry.any_freed() || events.has_discarded()) {
            process_pending();
        }
    }

    // Find out which user-held values the program no longer holds, and report them to the engine.
    // Must not be called while the engine performs an action.
    void poll();
    // Find the storages whose last reference from a variable of the program has disappeared, and
    // tell the engine that they are no longer user-held. The engine may then evict or free them.
    void poll_held();
    // Poll all storages without a deleter hook, whose free nothing reports, and process the freed
    // ones.
    void look_at_all();

    // Prepare for an operator that the program runs on the stream `now`. Return the index of that
    // stream.
    StreamIndex about_to_run(const std::optional<c10::Stream>& now) {
        const StreamIndex here = registry.device.see(now);
        process_pending_if_needed();
        if (registry.observers.transcriber.writes()) [[unlikely]] {
            poll();  // A trace needs the time at which the program frees a value.
        }
        return here;
    }

    // If `needed` more bytes would make a new peak of memory, process freed storages first, so that
    // the peak does not include them.
    void about_to_peak(Bytes needed) {
        if (registry.device.queues() && needed > engine.peak - engine.memory) [[unlikely]] {
            registry.poll_untracked(true);
            process_pending_if_needed();
        }
    }

    // Perform `run`, events of the engine that may recompute values. If the program freed an input
    // of a recomputation meanwhile, perform them again.
    template <class F>
    void recompute(F&& run, const char* who = "");
    // Update size and address in `record`, whose storage the program may have resized.
    void resized(StorageRecord& record);
    // Drop the runtime's strong reference to the memory of `record`, if neither autograd nor a
    // recipe needs it any more.
    void disown(StorageRecord& record);
    // Release the runtime's references to the storages in `engine.idle`. The program holds these
    // storages, and no recomputation needs them any more.
    void let_go_of_idle();

private:
    bool may_drop(const StorageRecord& record) const;
    void release(StorageRecord& record);
    void gone(StorageRecord& record);
    void hand_back(StorageRecord& record);

    unsigned ticks_ = 0;  // number of calls of `process_pending`
};

// The loop ends: each retry is caused by a value that the program freed meanwhile, and the program
// frees each value once.
template <class F>
void Frees::recompute(F&& run, const char* who) {
    for (std::size_t left = engine.n_storages();; --left) {
        try {
            events.perform(run, who);
            return;
        } catch (const MissingInputError&) {
            if (left == 0) {
                throw;
            }
        }
        look_at_all();
    }
}

}  // namespace rekindle
