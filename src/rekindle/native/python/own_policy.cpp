// Calls a policy written in Python; see memory/room/own_policy.h.
#include "../memory/room/own_policy.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "../base/mutex.h"
#include "../memory/room/consulting.h"
#include "../torch/dispatch_key.h"
#include "../torch/gil.h"
#include "conversions.h"

namespace rekindle {

namespace {

// The `rekindle.policies.Candidate` that a policy written in Python gets for a storage of the
// native engine.
struct CandidateObject final {
    PyObject_HEAD;
    // The storage of the native engine; null once it is destroyed.
    Storage* storage;
    PythonChooser* chooser;  // finds or makes the candidates of the storage's parents and children
    // The attributes that the storage had when it was destroyed, in the order of `numbers_of`.
    std::array<std::int64_t, 4> numbers;
};

// Return the attributes of `storage` that a policy written in Python may read.
std::array<std::int64_t, 4> numbers_of(const Storage& storage) noexcept {
    return {storage.nbytes, storage.cost, storage.last_access, storage.order};
}

CandidateObject& candidate_in(PyObject* object) noexcept {
    return *reinterpret_cast<CandidateObject*>(object);
}

// Getter of the attribute with index `which` in `numbers_of`. Any thread may call this getter,
// because a policy may pass candidates to other threads.
template <std::size_t which>
PyObject* number_in(PyObject* object, void* /*closure*/) noexcept {
    const CandidateObject& view = candidate_in(object);
    std::int64_t number = 0;
    {
        const Looking looking;
        const auto numbers = view.storage == nullptr ? view.numbers : numbers_of(*view.storage);
        number = numbers[which];
    }
    return PyLong_FromLongLong(number);
}

PyObject* is_resident(PyObject* object, void* /*closure*/) noexcept {
    const CandidateObject& view = candidate_in(object);
    const Looking looking;
    return PyBool_FromLong(view.storage != nullptr && view.storage->resident ? 1 : 0);
}

// Return a Python list with the objects of the storages that `each` visits. Make the list without
// holding the session mutex, because Python may collect garbage at this point.
template <class F>
PyObject* neighbors(PyObject* object, F&& each) noexcept {
    const CandidateObject& view = candidate_in(object);
    std::vector<PyObject*> found;
    {
        const Looking looking;
        if (view.storage != nullptr) {
            each(*view.storage, [&](Storage& neighbor) {
                if (PyObject* seen = view.chooser->view_of(neighbor); seen != nullptr) {
                    found.push_back(Py_NewRef(seen));
                }
            });
        }
    }
    PyObject* list =
        PyErr_Occurred() == nullptr ? PyList_New(static_cast<Py_ssize_t>(found.size())) : nullptr;
    for (std::size_t i = 0; i < found.size(); ++i) {
        if (list != nullptr) {
            PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), found[i]);
        } else {
            Py_DECREF(found[i]);
        }
    }
    return list;
}

PyObject* parents(PyObject* object, PyObject* /*nothing*/) noexcept {
    return neighbors(object, [](Storage& storage, auto&& visit) { each_parent(storage, visit); });
}

PyObject* children(PyObject* object, PyObject* /*nothing*/) noexcept {
    return neighbors(object, [](Storage& storage, auto&& visit) { each_child(storage, visit); });
}

void free_candidate(PyObject* object) noexcept {
    PyTypeObject* type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

// Return the Python type of `CandidateObject`, or null if Python raised. Needs the GIL.
PyTypeObject* candidate_type() noexcept {
    static PyTypeObject* type = nullptr;
    if (type != nullptr) {
        return type;
    }
    // NOLINTBEGIN(modernize-avoid-c-arrays): for Python
    static PyGetSetDef attributes[] = {
        {"nbytes", &number_in<0>, nullptr, "The size of the storage in bytes.", nullptr},
        {"cost",
         &number_in<1>,
         nullptr,
         "The cost of the operator calls that made the storage (ns).",
         nullptr},
        {"last_access", &number_in<2>, nullptr, "The time of the last access (ns).", nullptr},
        {"order",
         &number_in<3>,
         nullptr,
         "A number that grows each time the storage becomes a candidate.",
         nullptr},
        {"resident", &is_resident, nullptr, "True if the storage is in memory.", nullptr},
        {nullptr, nullptr, nullptr, nullptr, nullptr},
    };
    static PyMethodDef methods[] = {
        {"parents",
         &parents,
         METH_NOARGS,
         "The storages that must be resident to compute this one."},
        {"children", &children, METH_NOARGS, "The storages that are computed from this one."},
        {nullptr, nullptr, 0, nullptr},
    };
    static PyType_Slot slots[] = {
        {Py_tp_dealloc, reinterpret_cast<void*>(&free_candidate)},
        {Py_tp_getset, attributes},
        {Py_tp_methods, methods},
        {0, nullptr},
    };
    // NOLINTEND(modernize-avoid-c-arrays)
    static PyType_Spec spec = {
        "rekindle.native.Candidate",
        sizeof(CandidateObject),
        0,
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
        slots,
    };
    type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    return type;
}

// Scope that saves the pending Python error at its beginning, and restores the error at its end.
class PendingError final {
public:
    PendingError() {
        if (PyErr_Occurred() != nullptr) {
            error_.emplace().persist();
        }
    }

    PendingError(const PendingError&) = delete;
    PendingError& operator=(const PendingError&) = delete;

    // NOLINTNEXTLINE(bugprone-exception-escape): restore() does not throw, but does not say so
    ~PendingError() {
        if (error_) {
            error_->restore();
        }
    }

private:
    std::optional<python_error> error_;
};

}  // namespace

// Scope in which one thread calls the Python policy. `is_first` is false if the policy is being
// called already.
class PythonChooser::Busy final {
public:
    explicit Busy(bool& flag) noexcept : flag_(flag), is_first_(take()) {}

    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

    ~Busy() {
        const Looking looking;
        flag_ = flag_ && !is_first_;
    }

    bool is_first() const noexcept { return is_first_; }

private:
    bool take() noexcept {
        const Looking looking;
        return !std::exchange(flag_, true);
    }

    bool& flag_;
    const bool is_first_;
};

PythonChooser::PythonChooser(PyObject* object) : object_(object) {
    must(candidate_type() != nullptr);
    const Object remembers(PyObject_GetAttrString(object, "remembers"));
    const int truth = PyObject_IsTrue(remembers.get());
    must(truth >= 0);
    remembers_ = truth != 0;
    Py_INCREF(object_);
}

PythonChooser::~PythonChooser() {
    if (Py_IsInitialized() == 0) {
        return;
    }
    const Gil gil;
    for (const auto& [storage, object] : views_) {
        CandidateObject& view = candidate_in(object);
        view.numbers = numbers_of(*storage);
        view.storage = nullptr;
        Py_DECREF(object);
    }
    Py_DECREF(object_);
}

PyObject* PythonChooser::view_of(Storage& storage) {
    const auto found = views_.find(&storage);
    if (found != views_.end()) {
        return found->second;
    }
    PyTypeObject* type = candidate_type();
    PyObject* made = type->tp_alloc(type, 0);
    if (made != nullptr) {
        candidate_in(made).storage = &storage;
        candidate_in(made).chooser = this;
        views_.emplace(&storage, made);
    }
    return made;
}

void PythonChooser::disposed(Storage& storage) noexcept {
    losses_.erase(&storage);
    const auto found = views_.find(&storage);
    if (found == views_.end() || Py_IsInitialized() == 0) {
        return;
    }
    const Gil gil;
    PyObject* object = found->second;
    views_.erase(found);
    candidate_in(object).numbers = numbers_of(storage);
    candidate_in(object).storage = nullptr;
    Py_DECREF(object);
}

// -- events of the engine -------------------------------------------------------------------------

// Queue a call of the policy's Python method `method` with `storage` as the argument.
void PythonChooser::queue_event(const char* method, Storage& storage) {
    events_.push_back({method, Ref<Storage>(&storage)});
    any_events_.store(true, std::memory_order_relaxed);
}

// Make the queued calls of the policy's methods, unless the policy is being called already.
void PythonChooser::deliver_if_free() {
    if (Py_IsInitialized() == 0) {
        return;
    }
    const Busy busy(busy_);
    if (!busy.is_first()) {
        return;  // the thread that is calling the policy makes the queued calls
    }
    const c10::impl::ExcludeDispatchKeyGuard passing(KEY);
    const Gil gil;
    deliver_queued();
}

// Make the calls of the policy's methods that are queued now. Calls that other threads queue
// meanwhile wait for the next delivery. Needs the GIL, and must be called without the session
// mutex.
void PythonChooser::deliver_queued() {
    std::size_t left = 0;
    {
        const Looking looking;
        left = events_.size();
    }
    for (const char* method = nullptr; left > 0; --left) {
        PyObject* view = next_event(method);
        if (view == nullptr) {
            return;
        }
        const Object heard(view);
        const Object done(PyObject_CallMethod(object_, method, "O", view));
    }
}

// Remove the oldest call from the queue of events. Set `method` to its method, and return a new
// reference to the Python object of its storage. Return null if the queue is empty.
PyObject* PythonChooser::next_event(const char*& method) {
    const Looking looking;
    if (events_.empty()) {
        return nullptr;
    }
    PyObject* view = view_of(*events_.front().storage);
    must(view != nullptr);
    method = events_.front().method;
    Py_INCREF(view);
    events_.pop_front();
    any_events_.store(!events_.empty(), std::memory_order_relaxed);
    return view;
}

// -- choosing -------------------------------------------------------------------------------------

Storage* PythonChooser::choose(Nanoseconds now) {
    if (Py_IsInitialized() == 0) {
        return nullptr;
    }
    if (busy_) {
        return oldest();
    }
    for (;;) {
        Answer answer;
        {
            const Busy busy(busy_);
            const Consulting consulting(*frees_);
            const Gil gil;
            const PendingError pending;
            deliver_queued();
            answer = ask(now);
        }
        const bool any = answer.storage != nullptr && answer.storage->order >= 0;
        if (!answer.stale && (any || (answer.storage == nullptr && events_.empty()))) {
            return answer.storage;
        }
    }
}

// Call the policy's `choose`, which returns a storage to evict. Needs the GIL, and must be called
// without the session mutex.
PythonChooser::Answer PythonChooser::ask(Nanoseconds now) {
    const Object chosen(PyObject_CallMethod(object_, "choose", "L", static_cast<long long>(now)));
    if (chosen.get() == Py_None) {
        return {};
    }
    Storage* storage = nullptr;
    bool stale = false;
    if (Py_TYPE(chosen.get()) == candidate_type()) {
        const Looking looking;
        const CandidateObject& view = candidate_in(chosen.get());
        const bool mine = view.chooser == this;
        storage = mine && candidates_.contains(view.storage) ? view.storage : nullptr;
        stale = mine && storage == nullptr && !events_.empty();
    }
    if (storage == nullptr && !stale) {
        PyErr_Format(
            PyExc_ValueError,
            "%R.choose(%lld) returned %R: wanted one of the candidates (storages that were passed "
            "to add() and not yet to remove()), or None if there is none",
            object_,
            static_cast<long long>(now),
            chosen.get()
        );
        Object::throw_error();
    }
    if (storage != nullptr && frees_->engine.host != nullptr) {
        const Object answer(PyObject_CallMethod(object_, "recompute_ns", "O", chosen.get()));
        const Nanoseconds price = PyLong_AsLongLong(answer.get());
        must(price != -1 || PyErr_Occurred() == nullptr);
        const Looking looking;
        priced_ = storage;
        price_ = price;
    }
    return {storage, stale};
}

// Return the candidate for eviction that was not accessed for the longest time.
Storage* PythonChooser::oldest() const noexcept {
    const auto before = [](const Storage* one, const Storage* other) {
        return std::pair(one->last_access, one->order) <
               std::pair(other->last_access, other->order);
    };
    const auto found = std::ranges::min_element(candidates_, before);
    return found == candidates_.end() ? nullptr : *found;
}

double PythonChooser::loss(Storage& storage, Nanoseconds now) {
    const auto found = losses_.find(&storage);
    return found == losses_.end() ? own_loss(storage, now) : found->second;
}

void PythonChooser::ask_losses(Nanoseconds now) {
    losses_.clear();
    if (busy_ || Py_IsInitialized() == 0) {
        return;
    }
    std::vector<Ref<Storage>> asked;
    asked.reserve(candidates_.size());
    for (Storage* candidate : candidates_) {
        asked.emplace_back(candidate);
    }
    const Busy busy(busy_);
    const Consulting consulting(*frees_);
    const Gil gil;
    const PendingError pending;
    deliver_queued();
    for (const Ref<Storage>& each : asked) {
        Storage* storage = each.get();
        PyObject* view = nullptr;
        {
            const Looking looking;
            view = candidates_.contains(storage) ? Py_XNewRef(view_of(*storage)) : nullptr;
        }
        if (view == nullptr) {
            must(PyErr_Occurred() == nullptr);
            continue;
        }
        const Object seen(view);
        const auto clock = static_cast<long long>(now);
        const Object answer(PyObject_CallMethod(object_, "loss", "OL", view, clock));
        const double loss = PyFloat_AsDouble(answer.get());
        must(loss != -1 || PyErr_Occurred() == nullptr);
        const Looking looking;
        losses_[storage] = loss;
    }
}

}  // namespace rekindle
