// The state of one budget: its parts, and the order in which they are built and destroyed.
//
// A session handles storages only. Operators and autograd use it through dispatch/. There is one
// session per `rekindle.budget(...)`. A session lives until its budget has ended and autograd's
// handles of its values (`SavedTensorHandle`) are destroyed.
//
// Terms: a record describes one storage. A source is a storage without a recipe, which cannot be
// recomputed. A value is user-held if variables of the program refer to it. A placeholder is the
// empty storage that an evicted user-held value leaves to the program. A handle is a reference of
// autograd to a saved value.
//
// Locking: the caller of a member holds the session mutex, unless the member's comment says
// otherwise (see NOTE [Lock discipline] in base/mutex.h).
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>

#include "../engine/engine.h"
#include "../ops/prices.h"
#include "../torch/device.h"
#include "../torch/rng_history.h"
#include "held/held.h"
#include "observers/observers.h"
#include "observers/step_observer.h"
#include "recomputer/in_progress.h"
#include "recomputer/recomputer.h"
#include "registry/registry.h"
#include "room/events.h"
#include "room/frees.h"
#include "room/room.h"
#include "sources/history.h"
#include "sources/resizes.h"
#include "sources/sources.h"
#include "sources/storages.h"
#include "sources/swapped_tensors.h"

namespace rekindle {

class PythonChooser;  // NOLINT(cppcoreguidelines-virtual-class-destructor): it is final

// The state of one budget. It owns the parts; callers ask the part that they need.
class Session final : public c10::intrusive_ptr_target {
public:
    // `where` is the device whose memory the budget limits. If `assumed`, the user did not name it,
    // and a program that uses another device gets an error. If `learns`, the engine follows learned
    // plans. `own` is a policy written in Python that replaces `policy`, or null.
    Session(
        Bytes budget,
        c10::Device where,
        bool assumed,
        bool learns,
        const Policy& policy,
        std::unique_ptr<PythonChooser> own
    );
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
    ~Session() override;

    // The parts, each built on those before it. What the engine's destructor asks stands before the
    // engine, so that it is destroyed after it: the observers, the device, the registry, and the
    // recomputer, which returns records and recipes to the registry.
    Observers observers;
    Device device;
    Registry registry;
    InProgress in_progress;  // the operators that run now
    Recomputer recomputer;
    // policy written in Python, which the engine owns; null: a built-in policy decides
    PythonChooser* const own_policy;
    Engine engine;
    Events events;
    Frees frees;
    Room room;
    Storages storages;
    History history;
    Sources sources;
    Resizes resizes;
    SwappedTensors swapped_tensors;
    Held held;
    Prices prices;
    // states of the random generators, so that a recomputation draws the same numbers
    RngHistory positions;

    // State for backward operators that write their result over their incoming gradient, which
    // saves one allocation; see dispatch/in_place.h.
    struct TakingOver final {
        // Backward operators may write their result over their incoming gradient. False only in
        // tests.
        bool allowed = true;
        // A recorded trace names the results that would be written over a gradient if Rekindle's
        // own dispatch mode were off.
        bool predicted = false;
        std::int64_t taken_over = 0;  // number of calls whose result was written over a gradient
        // For tests: the fewest references, without that of a boxed argument, seen to a gradient
        // whose storage had no owner but the autograd node and the running call.
        std::int64_t fewest = std::numeric_limits<std::int64_t>::max();
    };

    TakingOver taking_over;
    bool records_streams = false;  // the program called `record_stream`
    int never_recompute = 0;       // nesting depth of `rekindle.never_recompute()`

    // object that recognizes repeated training steps; null: steps are not followed
    std::unique_ptr<StepObserver> steps;
    bool slices = false;            // operators that have no room run in slices
    bool has_sliced = false;        // an operator has run in slices
    bool uses_arena = false;        // PyTorch's CPU allocations come from rekindle's arena
    std::atomic<int> rejoined = 0;  // how often other code had cleared the dispatch key (`rejoin`)

    // Sequence number of this session in the process, counted from 1; never reused.
    const std::uint64_t ordinal;

    // Return true if operators that have no room may run in slices.
    bool may_slice() const noexcept;

    // End the budget, and restore the evicted values that the program holds. From now on a freed
    // storage or a destroyed handle is processed at once, because no later operator call would
    // process it. That holds after an error too.
    void close();

    std::size_t bytes_of_bookkeeping() const noexcept;

private:
    void close_books(bool restored) noexcept;
};

// Return the session of the active budget if this thread works within that budget, else null. A
// thread that joined an earlier budget does not. Any thread may call this function, without the
// session mutex.
c10::intrusive_ptr<Session> active();
// Take the session mutex, and return the session for an operator with the dispatch keys `keys`. The
// caller must then release the mutex. If the operator runs outside any budget, release the mutex
// and return null.
c10::intrusive_ptr<Session> lock_and_see(c10::DispatchKeySet keys);
// Tell all sessions that the program has given `tensor` other memory (`tensor.data = ...`).
void tensor_moved(const c10::TensorImpl& tensor, c10::StorageImpl& before);
// Return true if any session exists, also one whose budget has ended. Needs no mutex.
bool any_sessions() noexcept;
// Make this Python thread work within the budget of `session`, so that its operators pass
// Rekindle's dispatch key; null: within no budget.
void join(const Session* session) noexcept;
// Include the key again if other code has cleared it. Return true if this thread includes it now.
bool rejoin();
// Make `session` the one active budget of this process; null: no budget is active.
void set_active(c10::intrusive_ptr<Session> session);
// Return the number of sessions in this process, also of ended budgets whose graphs still exist.
std::size_t drivers_alive() noexcept;
// Return true if no thread that the program started inside the budget has run a backward pass, and
// this thread is not such a thread.
bool gradients_stay();
// Return true if no such thread has run a backward pass, and this one is such a thread. Then only
// the thread that entered the budget takes snapshots of the memory peak.
bool looks_later();

}  // namespace rekindle
