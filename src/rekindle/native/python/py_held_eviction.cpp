#include "py_held_eviction.h"

#include <torch/csrc/autograd/python_variable.h>

#include <memory>

#include "../memory/evict_held_last.h"
#include "../memory/held/held_eviction.h"
#include "../memory/notify.h"
#include "../torch/geometry.h"
#include "../torch/parts.h"
#include "conversions.h"

namespace rekindle {

namespace {

// Add the storage of `tensor` to `storages`. For a sparse tensor, add the storages of its parts.
void add_storages(const at::Tensor& tensor, StorageList& storages) {
    if (has_memory(*tensor.unsafeGetTensorImpl())) {
        storages.push_back(tensor.storage().unsafeGetStorageImpl());
        return;
    }
    for (const at::Tensor& part : parts_of(tensor)) {
        storages.push_back(part.storage().unsafeGetStorageImpl());
    }
}

// For `evict="auto"`: restore `storages`, and register that Python code reads them, so that they
// are not evicted meanwhile. Return a number for `end_reading`.
std::int64_t begin_held_read(
    Session& session, const StorageList& storages, bool saved, Locked& lock
) {
    const std::int64_t number = session.held.begin_reading(storages, saved);
    try {
        for (const c10::StorageImpl* storage_impl : storages) {
            retry_evicting_held(session, lock, [&] { session.room.bring_back(*storage_impl); });
        }
    } catch (...) {
        session.held.end_reading(number);
        throw;
    }
    return number;
}

}  // namespace

// evict_anything(driver) -> None
//
// From now on, evict values that the user's variables hold like all others (`evict="anything"`).
// Must be called before the budget is entered.
PyObject* evict_anything(PyObject* arguments) {
    Session& session = session_in(arguments);
    TORCH_CHECK(
        can_make_placeholders(),
        "this torch cannot make an evicted storage raise an error when it is read"
    );
    const Locked lock;
    session.held.eviction = std::make_unique<HeldEviction>(
        session.frees, session.room, session.sources, session.history, session.in_progress
    );
    session.events.only_counting.allowed = false;
    return nothing();
}

// placeholders(driver) -> int
//
// Return the number of storages that are evicted although the program holds tensors in them.
PyObject* placeholders(PyObject* arguments) {
    Session& session = session_in(arguments);
    translate_errors(session, [&] {
        const Locked lock;
        session.frees.process_pending();
    });
    return PyLong_FromLong(session.registry.placeholders);
}

// record_without_grad(driver, change) -> None
//
// Enter (`change` = 1) or leave (-1) a scope in which values made with grad mode off get no recipe.
// Values without a recipe are not evicted.
PyObject* record_without_grad(PyObject* arguments) {
    PyObject* capsule = nullptr;
    int more = 0;
    parse(arguments, "Oi", &capsule, &more);
    const Locked lock;
    session_of(capsule).held.eviction->unrecorded += more;
    return nothing();
}

// begin_reading(driver, tensors, saved) -> int
//
// Restore the contents of `tensors`, and do not evict these tensors until `end_reading`. If
// `saved`, do not evict values that autograd saved either. Return a number for `end_reading`.
PyObject* begin_reading(PyObject* arguments) {
    PyObject* capsule = nullptr;
    PyObject* tensors = nullptr;
    int saved = 0;
    parse(arguments, "OOp", &capsule, &tensors, &saved);
    Session& session = session_of(capsule);
    StorageList storages;
    const Object each(PySequence_Fast(tensors, "tensors: a list"));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(each.get()); ++i) {
        PyObject* tensor = PySequence_Fast_GET_ITEM(each.get(), i);
        static_cast<void>(tensor_of(tensor));
        add_storages(THPVariable_Unpack(tensor), storages);
    }
    return PyLong_FromLongLong(translate_errors(session, [&] {
        Locked lock;
        return session.held.eviction ? session.held.eviction->begin_reading(storages, lock)
                                     : begin_held_read(session, storages, saved != 0, lock);
    }));
}

// end_reading(driver, number) -> None
//
// End the read that `begin_reading` began.
PyObject* end_reading(PyObject* arguments) {
    PyObject* capsule = nullptr;
    long long number = 0;
    parse(arguments, "OL", &capsule, &number);
    Session& session = session_of(capsule);
    translate_errors(session, [&] {
        const Locked lock;
        if (session.held.eviction) {
            session.held.eviction->end_reading(number);
        } else {
            session.held.end_reading(number);
        }
    });
    return nothing();
}

}  // namespace rekindle
