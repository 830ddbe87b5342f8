// The sessions of the process, which of them is active, and the beginning and end of a budget.
#include "session.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <pthread.h>

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "../allocator/arena.h"
#include "../torch/backward.h"
#include "../torch/dispatch_key.h"
#include "../torch/private_generators.h"
#include "../torch/raised.h"
#include "observers/program.h"
#include "room/own_policy.h"
#include "room/swapper.h"

namespace rekindle {

namespace {

std::vector<Session*>& sessions() {
    static auto& made = leaky_singleton<std::vector<Session*>>();
    return made;
}

// Length of `sessions()`, which any thread may read without the session mutex.
std::atomic<int> n_sessions{0};

struct Active final {
    SpinLock& flag = leaf(Leaf::active);
    c10::intrusive_ptr<Session> session;
    pthread_t entered_in{};  // thread that opened the budget
    // A thread that the program started inside the budget has run a backward pass, so it may free
    // gradients that the main thread reads.
    bool trained_elsewhere = false;
};

[[gnu::always_inline]] inline Active& the_active() {
    static auto& made = leaky_singleton<Active>();
    return made;
}

// Return the sequence number of the budget (session) to which this thread was assigned (`join`).
// The number is 0 for a thread that was assigned to none, such as a thread of autograd's engine.
// Such a thread works within the active budget.
std::uint64_t& joined() noexcept {
    thread_local std::uint64_t which = 0;
    return which;
}

std::uint64_t next_ordinal() noexcept {
    static std::atomic<std::uint64_t> made = 0;
    return made.fetch_add(1, std::memory_order_relaxed) + 1;
}

// Return true if the program started this thread, which was assigned to the budget `which`, inside
// the active budget. The caller holds the session mutex.
bool is_started_inside(std::uint64_t which) noexcept {
    if (which == 0) [[likely]] {
        return false;
    }
    return this_thread() != the_active().entered_in;
}

// Return the session of the active budget if this thread, which was assigned to the budget `which`,
// works within the active one, else null. The caller holds the session mutex or the spin lock of
// `Active`.
[[gnu::always_inline]] inline c10::intrusive_ptr<Session> active_for(std::uint64_t which) {
    const c10::intrusive_ptr<Session>& session = the_active().session;
    if (which != 0 && session && which != session->ordinal) [[unlikely]] {
        return {};
    }
    return session;
}

}  // namespace

c10::intrusive_ptr<Session> active() {
    const std::scoped_lock guard(the_active().flag);
    return active_for(joined());
}

c10::intrusive_ptr<Session> lock_and_see(c10::DispatchKeySet keys) {
    // Operators on meta tensors use no memory. If this thread already holds the session mutex,
    // Python code runs inside the core, for example the callback of a weak reference to a storage.
    // Operators of such code are not the program's, nor are those that a recomputed operator calls.
    // All these bypass the budget.
    if (keys.has_backend(c10::BackendComponent::MetaBit) || the_mutex().mine() ||
        PrivateGenerators::current() != nullptr) [[unlikely]] {
        return {};
    }
    std::unique_lock lock(the_mutex());
    const std::uint64_t which = joined();
    c10::intrusive_ptr<Session> session = active_for(which);
    if (!session) [[unlikely]] {
        if (which != 0) {
            join(nullptr);  // another thread has ended the budget of this thread
        }
        return {};
    }
    if (is_started_inside(which) && in_backward_pass()) [[unlikely]] {
        the_active().trained_elsewhere = true;
    }
    lock.release();
    return session;
}

bool gradients_stay() {
    const auto lock = locked_if_not_mine();
    return !the_active().trained_elsewhere && !is_started_inside(joined());
}

bool looks_later() {
    const auto lock = locked_if_not_mine();
    return !the_active().trained_elsewhere && is_started_inside(joined());
}

bool any_sessions() noexcept {
    return n_sessions.load(std::memory_order_relaxed) != 0;
}

void tensor_moved(const c10::TensorImpl& tensor, c10::StorageImpl& before) {
    const auto lock = locked_if_not_mine();
    for (Session* each : sessions()) {
        each->sources.note_moved(tensor, before);
    }
}

void join(const Session* session) noexcept {
    joined() = session == nullptr ? 0 : session->ordinal;
    c10::impl::tls_set_dispatch_key_included(KEY, session != nullptr);
}

bool rejoin() {
    if (c10::impl::tls_is_dispatch_key_included(KEY)) [[likely]] {
        return true;
    }
    const c10::intrusive_ptr<Session> session = joined() == 0 ? nullptr : active();
    if (!session || is_in_fake_mode()) {
        return false;
    }
    c10::impl::tls_set_dispatch_key_included(KEY, true);
    ++session->rejoined;
    return true;
}

void set_active(c10::intrusive_ptr<Session> session) {
    // Other threads read the active session with the session mutex or the spin lock held.
    const auto lock = locked_if_not_mine();
    const std::scoped_lock guard(the_active().flag);
    std::swap(the_active().session, session);
    if (the_active().session) {
        the_active().entered_in = this_thread();
        the_active().trained_elsewhere = false;
    }
}

Session::Session(
    Bytes budget,
    c10::Device where,
    bool assumed,
    bool learns,
    const Policy& policy,
    std::unique_ptr<PythonChooser> own
)
    : device(where),
      registry(device, observers, assumed),
      recomputer(in_progress, engine, registry, events, frees, room),
      own_policy(own.get()),
      engine(budget, recomputer, policy, learns, {}, std::move(own)),
      events(engine, registry),
      frees(engine, registry, events),
      room(frees, own_policy),
      storages(frees),
      history(engine, room, observers),
      sources(frees, room, storages),
      resizes(frees, room, storages, sources),
      swapped_tensors(frees),
      held(frees, room),
      ordinal(next_ordinal()) {
    observers.number = reinterpret_cast<std::ptrdiff_t>(this);
    observers.transcriber.follow(engine);
    in_progress.held = &held;
    if (own_policy != nullptr) {
        own_policy->choose_for(frees);
        events.only_counting.allowed = false;
    }
    sessions().push_back(this);
    ++n_sessions;
}

// NOLINTNEXTLINE(bugprone-exception-escape): throws only if not one byte is left for bookkeeping
Session::~Session() {
    without_throwing([&] { events.swapper.reset(); });
    const auto lock = locked_if_not_mine();
    std::erase(sessions(), this);
    --n_sessions;
    notify_gone();
    observers.steps = nullptr;
    steps.reset();
}

std::size_t drivers_alive() noexcept {
    const auto lock = locked_if_not_mine();
    return sessions().size();
}

bool Session::may_slice() const noexcept {
    const bool evicts_held = held.evicts_last || (held.eviction && held.eviction->open);
    return slices && evicts_held && own_policy == nullptr && never_recompute == 0 &&
           device.which().is_cpu() && !events.only_counting.on() && can_make_placeholders();
}

void Session::close() {
    // The books are closed also if a value cannot be restored: its operator fails, or Ctrl-C.
    bool restored = false;
    const auto closed = c10::make_scope_exit([&] { close_books(restored); });
    held.bring_all_back();
    restored = true;
}

void Session::close_books(bool restored) noexcept {
    for (Storage* each = engine.first_storage(); each != nullptr; each = each->next) {
        if (Gathered* source = record_of(*each).special.gathered()) {
            source->unwatched = true;
        }
        if (each->references == 0 && !each->consumed()) {
            // Drop the weak reference to the tensor, because `torch.utils.swap_tensors` refuses a
            // tensor that has one.
            record_of(*each).origin = no_tensor();
        }
    }
    registry.free_queue.late.store(true, std::memory_order_relaxed);
    if (std::exchange(uses_arena, false)) {
        the_arena().close(restored);  // an error leaves no memory behind (R10)
    }
}

void process_pending_late() noexcept {
    if (!the_mutex().try_lock()) {
        return;
    }
    without_throwing([] {
        for (Session* each : sessions()) {
            if (each->registry.free_queue.late.load(std::memory_order_relaxed) &&
                each->registry.free_queue.any()) {
                each->frees.process_pending();
            }
        }
    });
    the_mutex().unlock();
}

std::size_t Session::bytes_of_bookkeeping() const noexcept {
    return registry.records.nbytes() + observers.module_tensors.nbytes() + engine.graph.nbytes() +
           bytes_of_positions() + static_cast<std::size_t>(device.streams.nbytes());
}

}  // namespace rekindle
