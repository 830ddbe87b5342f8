#include "anything.h"

#include <torch/csrc/autograd/python_variable.h>

#include <memory>

#include "../memory/any_time.h"
#include "../memory/held.h"
#include "../memory/program.h"
#include "../torch/geometry.h"
#include "../torch/parts.h"
#include "conversions.h"

namespace rekindle {

namespace {

// Add the storage of `tensor`, or those of its parts if it is a sparse tensor.
void add_homes(const at::Tensor& tensor, Homes& homes) {
    if (has_memory(*tensor.unsafeGetTensorImpl())) {
        homes.push_back(tensor.storage().unsafeGetStorageImpl());
        return;
    }
    for (const at::Tensor& part : parts_of(tensor)) {
        homes.push_back(part.storage().unsafeGetStorageImpl());
    }
}

// Register a read of `homes`, and restore them. Enough for `evict="auto"`, where user-held values
// are evicted only as a last resort. Return the number of the read.
std::int64_t read_there(Driver& driver, const Homes& homes, bool saved, Locked& lock) {
    const std::int64_t number = ++driver.notes;
    driver.noted.emplace(number, std::make_unique<Reading>(driver, homes, saved));
    try {
        for (const c10::StorageImpl* home : homes) {
            or_lending(driver, lock, [&] { driver.bring_back(*home); });
        }
    } catch (...) {
        driver.noted.erase(number);
        throw;
    }
    return number;
}

}  // namespace

// let_go_of_anything(driver) -> None
//
// Evict user-held values like all others from now on (`evict="anything"`). Must be called before
// the budget is entered.
PyObject* let_go_of_anything(PyObject* arguments) {
    Driver& driver = driver_in(arguments);
    TORCH_CHECK(there_are_husks(), "with this torch storages cannot refuse to be read");
    const Locked lock;
    driver.any_time = std::make_unique<AnyTime>(driver);
    return nothing();
}

// husks(driver) -> int
//
// Return the number of storages of the program that are evicted while it holds them.
PyObject* husks(PyObject* arguments) {
    Driver& driver = driver_in(arguments);
    in_words(driver, [&] {
        const Locked lock;
        driver.settle();
    });
    return PyLong_FromLong(driver.husks);
}

// record_without_grad(driver, change) -> None
//
// Add (1) or remove (-1) a reason not to record recipes with grad mode off.
PyObject* record_without_grad(PyObject* arguments) {
    PyObject* capsule = nullptr;
    int more = 0;
    parse(arguments, "Oi", &capsule, &more);
    const Locked lock;
    driver_of(capsule).any_time->unrecorded += more;
    return nothing();
}

// lock_there(driver, tensors, saved) -> int
//
// Restore the memory of `tensors`, and keep it until `unlock_there`. If `saved`, values that
// autograd saved are kept as well. Return a number for `unlock_there`.
PyObject* lock_there(PyObject* arguments) {
    PyObject* capsule = nullptr;
    PyObject* tensors = nullptr;
    int saved = 0;
    parse(arguments, "OOp", &capsule, &tensors, &saved);
    Driver& driver = driver_of(capsule);
    Homes homes;
    const Object each(PySequence_Fast(tensors, "tensors: a list"));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(each.get()); ++i) {
        PyObject* tensor = PySequence_Fast_GET_ITEM(each.get(), i);
        static_cast<void>(tensor_of(tensor));
        add_homes(THPVariable_Unpack(tensor), homes);
    }
    return PyLong_FromLongLong(in_words(driver, [&] {
        Locked lock;
        return driver.any_time ? driver.any_time->lock_there(homes, lock)
                               : read_there(driver, homes, saved != 0, lock);
    }));
}

// unlock_there(driver, number) -> None
//
// End the read that `lock_there` began.
PyObject* unlock_there(PyObject* arguments) {
    PyObject* capsule = nullptr;
    long long number = 0;
    parse(arguments, "OL", &capsule, &number);
    Driver& driver = driver_of(capsule);
    in_words(driver, [&] {
        const Locked lock;
        if (driver.any_time) {
            driver.any_time->unlock_there(number);
        } else {
            driver.noted.erase(number);
        }
    });
    return nothing();
}

}  // namespace rekindle
