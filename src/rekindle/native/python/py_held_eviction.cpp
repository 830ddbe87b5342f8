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
    Driver& driver, const StorageList& storages, bool saved, Locked& lock
) {
    const std::int64_t number = driver.held.begin_reading(storages, saved);
    try {
        for (const c10::StorageImpl* storage_impl : storages) {
            retry_evicting_held(driver, lock, [&] { driver.room.bring_back(*storage_impl); });
        }
    } catch (...) {
        driver.held.end_reading(number);
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
    Driver& driver = driver_in(arguments);
    TORCH_CHECK(
        can_make_placeholders(),
        "this torch cannot make an evicted storage raise an error when it is read"
    );
    const Locked lock;
    driver.held.eviction = std::make_unique<HeldEviction>(
        driver.frees, driver.room, driver.sources, driver.history, driver.in_progress
    );
    driver.events.only_counting.allowed = false;
    return nothing();
}

// placeholders(driver) -> int
//
// Return the number of storages that are evicted although the program holds tensors in them.
PyObject* placeholders(PyObject* arguments) {
    Driver& driver = driver_in(arguments);
    translate_errors(driver, [&] {
        const Locked lock;
        driver.frees.process_pending();
    });
    return PyLong_FromLong(driver.registry.placeholders);
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
    driver_of(capsule).held.eviction->unrecorded += more;
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
    Driver& driver = driver_of(capsule);
    StorageList storages;
    const Object each(PySequence_Fast(tensors, "tensors: a list"));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(each.get()); ++i) {
        PyObject* tensor = PySequence_Fast_GET_ITEM(each.get(), i);
        static_cast<void>(tensor_of(tensor));
        add_storages(THPVariable_Unpack(tensor), storages);
    }
    return PyLong_FromLongLong(translate_errors(driver, [&] {
        Locked lock;
        return driver.held.eviction ? driver.held.eviction->begin_reading(storages, lock)
                                    : begin_held_read(driver, storages, saved != 0, lock);
    }));
}

// end_reading(driver, number) -> None
//
// End the read that `begin_reading` began.
PyObject* end_reading(PyObject* arguments) {
    PyObject* capsule = nullptr;
    long long number = 0;
    parse(arguments, "OL", &capsule, &number);
    Driver& driver = driver_of(capsule);
    translate_errors(driver, [&] {
        const Locked lock;
        if (driver.held.eviction) {
            driver.held.eviction->end_reading(number);
        } else {
            driver.held.end_reading(number);
        }
    });
    return nothing();
}

}  // namespace rekindle
