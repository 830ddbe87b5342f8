#include "anything.h"

#include <torch/csrc/autograd/python_variable.h>

#include <memory>

#include "any_time.h"
#include "conversions.h"
#include "parts.h"
#include "python.h"

namespace rekindle {

namespace {

void add_homes(const at::Tensor& tensor, Homes& homes) {
    if (has_memory(*tensor.unsafeGetTensorImpl())) {
        homes.push_back(tensor.storage().unsafeGetStorageImpl());
        return;
    }
    for (const at::Tensor& part : parts_of(tensor)) {
        homes.push_back(part.storage().unsafeGetStorageImpl());
    }
}

}  // namespace

// let_go_of_anything(driver): from the beginning, what variables hold is let go like all else
PyObject* let_go_of_anything(PyObject* arguments) {
    Driver& driver = driver_in(arguments);
    TORCH_CHECK(there_are_husks(), "with this torch storages cannot refuse to be read");
    const Locked lock;
    driver.any_time = std::make_unique<AnyTime>(driver);
    return nothing();
}

// husks(driver) -> how many storages of the program are empty now
PyObject* husks(PyObject* arguments) {
    Driver& driver = driver_in(arguments);
    in_words(driver, [&] {
        const Locked lock;
        driver.settle();
    });
    return PyLong_FromLong(driver.husks);
}

// record_without_grad(driver, 1 or -1): one reason more, or less, that there are no recipes then
PyObject* record_without_grad(PyObject* arguments) {
    PyObject* capsule = nullptr;
    int more = 0;
    parse(arguments, "Oi", &capsule, &more);
    const Locked lock;
    driver_of(capsule).any_time->unrecorded += more;
    return nothing();
}

// lock_there(driver, tensors) -> a number: until that is unlocked, their memory is there
PyObject* lock_there(PyObject* arguments) {
    PyObject* capsule = nullptr;
    PyObject* tensors = nullptr;
    parse(arguments, "OO", &capsule, &tensors);
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
        return driver.any_time->lock_there(homes, lock);
    }));
}

// unlock_there(driver, number)
PyObject* unlock_there(PyObject* arguments) {
    PyObject* capsule = nullptr;
    long long number = 0;
    parse(arguments, "OL", &capsule, &number);
    Driver& driver = driver_of(capsule);
    in_words(driver, [&] {
        const Locked lock;
        driver.any_time->unlock_there(number);
    });
    return nothing();
}

}  // namespace rekindle
