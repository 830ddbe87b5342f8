// Adapter for a policy written in Python, as an implementation of the engine's `Chooser`.
#pragma once

#include <atomic>
#include <deque>
#include <unordered_map>
#include <unordered_set>

#include "../../engine/chooser.h"

// Python's `PyObject`, declared as in Python.h.
struct _object;

namespace rekindle {

class Frees;

// Forwards the engine's events to a Python object, and the object's choices of storages to evict to
// the engine. Twin of the base class in rekindle.policies._base.
//
// Python code never runs with the session mutex held. Events are therefore queued in order, and
// delivered before the next choice or at the end of an operator (`deliver_events`). While Python
// chooses, the scope `Consulting` releases the mutex, so other threads may enter. If the chosen
// storage is no longer a candidate afterwards, Python is asked again.
//
// Python handles one question or one event at a time. Another thread that needs room meanwhile
// evicts the least recently used candidate, because waiting for the answer could deadlock.
class PythonChooser final : public Chooser {
public:
    // object: the Python `rekindle.policies.Chooser` to ask. The caller holds the GIL.
    explicit PythonChooser(_object* object);
    PythonChooser(const PythonChooser&) = delete;
    PythonChooser& operator=(const PythonChooser&) = delete;
    ~PythonChooser() override;

    // Set the budget whose engine asks this Python policy for storages to evict.
    void choose_for(Frees& frees) noexcept { frees_ = &frees; }

    bool remembers() const override { return remembers_; }

    void add(Storage& storage) override {
        candidates_.insert(&storage);
        queue_event("add", storage);
    }

    void remove(Storage& storage) override {
        candidates_.erase(&storage);
        queue_event("remove", storage);
    }

    // Ask the Python policy for a storage to evict. Throws the error that Python raises.
    Storage* choose(Nanoseconds now) override;

    // Do nothing: the Python policy receives its events only from `deliver_events` and `choose`.
    void catch_up(Nanoseconds /*now*/) override {}

    // Return the recomputation cost that Python gave when it chose `storage`, else the engine's
    // estimate.
    Nanoseconds recompute_ns(Storage& storage) override {
        return priced_ == &storage ? price_ : storage.cost;
    }

    // Return the loss of evicting `storage` that Python gave when asked by `ask_losses`, else its
    // cost divided by its staleness.
    double loss(Storage& storage, Nanoseconds now) override;

    void evicted(Storage& storage) override { queue_event("evicted", storage); }

    void returned(Storage& storage) override { queue_event("returned", storage); }

    void forgotten(Storage& storage) override { queue_event("forgotten", storage); }

    void touched(Storage& storage) override { queue_event("touched", storage); }

    void repriced(Storage& storage) override { queue_event("repriced", storage); }

    void disposed(Storage& storage) noexcept override;

    // Deliver queued events to the Python policy, and throw the error that it raises. Must be
    // called without the session mutex.
    void deliver_events() {
        if (any_events_.load(std::memory_order_relaxed)) {
            deliver_if_free();
        }
    }

    // Ask Python for the loss of evicting each candidate at the engine's clock `now` (ns). The loss
    // does not depend on the candidate's size.
    void ask_losses(Nanoseconds now);

    // Return the Python object for `storage`, the same one as long as the storage lives. The
    // reference is borrowed. Return null if Python raised. Needs the session mutex and the GIL.
    _object* view_of(Storage& storage);

private:
    // An event of the engine that the Python policy has not received yet.
    struct QueuedEvent final {
        const char* method;
        Ref<Storage> storage;
    };

    // Answer of the Python policy. `storage` is null if Python chose no candidate. `stale`: the
    // chosen storage is not a candidate any more.
    struct Answer final {
        Storage* storage = nullptr;
        bool stale = false;
    };

    class Busy;

    void queue_event(const char* method, Storage& storage);
    void deliver_if_free();
    void deliver_queued();
    _object* next_event(const char*& method);
    Answer ask(Nanoseconds now);
    Storage* oldest() const noexcept;

    _object* object_;
    Frees* frees_ = nullptr;
    bool remembers_ = false;
    bool busy_ = false;  // a thread is calling Python now
    std::unordered_map<const Storage*, _object*> views_;
    std::unordered_set<Storage*> candidates_;
    std::deque<QueuedEvent> events_;
    std::atomic<bool> any_events_ = false;
    // The storage that the Python policy chose last, and its recomputation cost according to the
    // policy.
    const Storage* priced_ = nullptr;
    Nanoseconds price_ = 0;
    std::unordered_map<const Storage*, double> losses_;
};

}  // namespace rekindle
