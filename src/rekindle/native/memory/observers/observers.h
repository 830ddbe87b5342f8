// Observers of a run: recordings, samples, statistics, and notifications for Python.
//
// The other parts of a budget report to the observers, which use no other part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "../../engine/ledger.h"
#include "../../engine/samples.h"
#include "audit.h"
#include "kept_calls.h"
#include "lost_time.h"
#include "module_tensors.h"
#include "notifications.h"
#include "peak_watch.h"
#include "sliced_runs.h"
#include "step_observer.h"
#include "transcript.h"
#include "unpacked.h"

namespace rekindle {

// The observers of one budget. The caller holds the session mutex.
struct Observers final {
    // Id of the budget in calls from and to Python: the address of its session.
    std::ptrdiff_t number = 0;
    Notifications due;
    Samples samples;  // memory in use over time
    PeakWatch peak_watch;
    LostTime lost;  // time spent choosing, evicting and recomputing
    KeptCallsByReason kept_calls;
    SlicedRuns sliced_runs;
    ModuleTensors module_tensors;
    UnpackedByNode unpacked;  // saved values that the running backward node reads
    // Writes events into traces. While a trace is recorded, every storage gets a record.
    Transcriber transcriber;
    // Traces whose recording Python started, by the number that Python uses for them.
    std::map<std::int64_t, Transcript> transcripts;
    // The whole run is recorded as a trace. Recipes are never dropped then, because a trace has no
    // event for a dropped recipe.
    bool recorded = false;
    // Compares recomputed values with the first ones by checksum; null: no comparison.
    std::unique_ptr<Audit> audit;
    // Recognizes repeated training steps; null: steps are not followed. The session owns it.
    StepObserver* steps = nullptr;
    // number of evictions so far, not counting values that nothing could use again
    std::int64_t evictions = 0;
    std::int64_t recomputations = 0;
    // operator calls that ran twice, because the workspace of the first call did not fit into the
    // budget
    std::int64_t repeated_calls = 0;

    // Remember that a module was given `tensor` as a parameter or as a buffer, for snapshots of
    // memory.
    void add_module_tensor(const c10::TensorImpl& tensor, bool parameter) {
        module_tensors.add(weak(tensor), parameter);
        due.models_due |= parameter;
    }

    // Note the bytes in use. Called after every operator that changes them.
    void look(const Ledger& engine) {
        peak_watch.look(engine.memory);
        samples.look(engine);
        due.samples_due = samples.full();
    }

    // Return true if events are recorded, or if recomputed values are compared with the first ones:
    // every operator then needs a record.
    bool need_records() const noexcept {
        return recorded || transcriber.writes() || !transcripts.empty() || audit != nullptr;
    }
};

}  // namespace rekindle
