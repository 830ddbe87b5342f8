#include "py_optimizer.h"

#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <utility>
#include <vector>

#include "../base/mutex.h"
#include "../memory/evict_held_last.h"
#include "../torch/geometry.h"
#include "../torch/pyobjects.h"
#include "conversions.h"

namespace rekindle {

namespace {

// Scope of one nesting level of a container. Raises RecursionError at the depth at which nested
// Python calls would.
class Deeper final {
public:
    Deeper() { must(Py_EnterRecursiveCall(" in the state of an optimizer") == 0); }

    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;
    Deeper(Deeper&&) = delete;
    Deeper& operator=(Deeper&&) = delete;

    ~Deeper() { Py_LeaveRecursiveCall(); }
};

template <class F>
void each_within(PyObject* value, F& visit);

// Visit the tensors of which the tensor subclass `value` consists, such as a DTensor.
template <class F>
// NOLINTNEXTLINE(misc-no-recursion): containers are nested
void each_part(PyObject* value, F& visit) {
    const Object told(PyObject_CallMethod(value, "__tensor_flatten__", nullptr));
    const Object parts(PySequence_GetItem(told.get(), 0));
    const Object names(PySequence_Fast(parts.get(), "__tensor_flatten__: names wanted"));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(names.get()); ++i) {
        const Object part(PyObject_GetAttr(value, PySequence_Fast_GET_ITEM(names.get(), i)));
        each_within(part.get(), visit);
    }
}

// Visit the values of a dict, or the items of a list or tuple.
template <class F>
// NOLINTNEXTLINE(misc-no-recursion): containers are nested
void each_item(PyObject* value, F& visit) {
    if (PyDict_Check(value)) {
        PyObject* key = nullptr;
        PyObject* item = nullptr;
        for (Py_ssize_t at = 0; PyDict_Next(value, &at, &key, &item) != 0;) {
            each_within(item, visit);
        }
    } else if (PyList_Check(value) || PyTuple_Check(value)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
            each_within(PySequence_Fast_GET_ITEM(value, i), visit);
        }
    }
}

// Call `visit` with each tensor in nested containers, and with the parts of tensor subclasses.
template <class F>
// NOLINTNEXTLINE(misc-no-recursion): containers are nested
void each_within(PyObject* value, F& visit) {
    if (PyLong_Check(value) || PyFloat_Check(value) || value == Py_None) {
        return;
    }
    const Deeper deeper;
    const Object kept(Py_NewRef(value));
    if (!THPVariable_Check(value)) {
        each_item(value, visit);
        return;
    }
    const at::Tensor& tensor = THPVariable_Unpack(value);
    if (is_plain_object(*tensor.unsafeGetTensorImpl()) ||
        PyObject_HasAttrString(value, "__tensor_flatten__") == 0) {
        visit(tensor);
    } else {
        each_part(value, visit);
    }
}

// Looks up the optimizer state of one parameter after the other. State is usually in the order of
// the parameters. Then no parameter has to be hashed, which would call Python.
class States final {
public:
    explicit States(PyObject* state) : state_(state) {
        if (PyDict_Check(state_) == 0) {
            PyErr_SetString(PyExc_TypeError, "the state of an optimizer: a dict is wanted");
            Object::throw_error();
        }
        advance();
    }

    // Return the optimizer state of `parameter`, or null.
    PyObject* of(PyObject* parameter) {
        if (parameter != key_) {
            PyObject* found = PyDict_GetItemWithError(state_, parameter);
            must(found != nullptr || PyErr_Occurred() == nullptr);
            return found;
        }
        PyObject* found = value_;
        advance();
        return found;
    }

private:
    void advance() {
        if (PyDict_Next(state_, &at_, &key_, &value_) == 0) {
            key_ = nullptr;
        }
    }

    PyObject* state_;
    Py_ssize_t at_ = 0;
    PyObject* key_ = nullptr;
    PyObject* value_ = nullptr;
};

using Tensors = std::vector<at::Tensor>;

struct Optimized final {
    Tensors read;  // all parameters with their gradients and optimizer state
    // Tensors that the step may write: parameters with a gradient, their gradient and state.
    Tensors written;
    bool is_plain = true;  // all parameters are ordinary tensors and all gradients dense
    std::string kind;      // key: steps of equal kind need the same memory
};

// Append the bytes of `number` to the key of a step.
template <class Number>
void append(std::string& text, Number number) {
    text.append(reinterpret_cast<const char*>(&number), sizeof(number));
}

// Add a parameter with its gradient and state to `found`, and extend the key of the step.
void add_parameter(PyObject* parameter, States& states, Optimized& found) {
    if (!THPVariable_Check(parameter)) {
        found.is_plain = false;
        return;
    }
    const at::Tensor& tensor = THPVariable_Unpack(parameter);
    PyObject* state = states.of(parameter);
    const at::Tensor& gradient = tensor.unsafeGetTensorImpl()->grad();
    found.is_plain = found.is_plain && is_plain_object(*tensor.unsafeGetTensorImpl());
    if (!gradient.defined()) {
        append(found.kind, '\0');
        return;
    }
    const bool dense = gradient.layout() == c10::kStrided;
    found.is_plain = found.is_plain && dense && is_plain_object(*gradient.unsafeGetTensorImpl());
    append(found.kind, '\1');
    append(found.kind, gradient.scalar_type());
    append(found.kind, dense ? std::int64_t{-1} : gradient._nnz());
    found.read.push_back(gradient);
    found.written.push_back(tensor);
    found.written.push_back(gradient);
    if (state == nullptr || PyDict_Check(state) == 0) {
        append(found.kind, std::int64_t{0});
        return;
    }
    append(found.kind, static_cast<std::int64_t>(PyDict_GET_SIZE(state)));
    PyObject* key = nullptr;
    PyObject* item = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(state, &at, &key, &item) != 0;) {
        if (THPVariable_Check(item)) {
            found.written.push_back(THPVariable_Unpack(item));
        }
    }
}

// Add the parameters of the parameter group `group` to `found`.
void add_group(PyObject* group, States& states, Optimized& found) {
    const Object listed(PyMapping_GetItemString(group, "params"));
    const Object parameters(PySequence_Fast(listed.get(), "parameters: a list is wanted"));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(parameters.get()); ++i) {
        add_parameter(PySequence_Fast_GET_ITEM(parameters.get(), i), states, found);
    }
}

// Collect the tensors of an optimizer. `groups`: its list of dicts; `state`: its dict by parameter.
Optimized optimized(PyObject* groups, PyObject* state) {
    Optimized found;
    const auto read = [&](const at::Tensor& tensor) { found.read.push_back(tensor); };
    each_within(groups, read);
    each_within(state, read);
    States states(state);
    const Object all(PySequence_Fast(groups, "groups of parameters: a list is wanted"));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all.get()); ++i) {
        add_group(PySequence_Fast_GET_ITEM(all.get(), i), states, found);
    }
    return found;
}

// Call `act` with each of `tensors` that has memory.
template <class F>
void each_with_memory(const Tensors& tensors, F&& act) {
    for (const at::Tensor& each : tensors) {
        if (has_memory(*each.unsafeGetTensorImpl())) {
            act(*each.unsafeGetTensorImpl());
        }
    }
}

// Recompute and pin the values that need the current contents of `written`, and release storages
// that only recipes of resident values need.
void save_what_needs(Driver& driver, const Tensors& written) {
    each_with_memory(written, [&](const c10::TensorImpl& each) { driver.save_what_needs(each); });
    // Otherwise these sources would be released later, and the optimizer step would seem to free
    // them.
    driver.release_recompute_sources();
}

}  // namespace

// tensors_within(value) -> list[Tensor]
//
// Return the tensors in `value`, which may be a nested container, in order.
PyObject* tensors_within(PyObject* arguments) {
    PyObject* value = nullptr;
    parse(arguments, "O", &value);
    Object list(PyList_New(0));
    const auto add = [&](const at::Tensor& tensor) {
        const Object object(THPVariable_Wrap(tensor));
        must(PyList_Append(list.get(), object.get()) == 0);
    };
    each_within(value, add);
    return list.give();
}

// begin_optimizer_step(driver, groups, state, saves) -> (bool, bytes)
//
// Count the tensors that the optimizer step reads, and make those that it writes sources and pin
// them. If `saves` and all parameters are plain, also recompute and pin the values that need the
// current contents of the written tensors (R4, sources). Return whether all parameters are plain,
// and a key for the kind of the step.
PyObject* begin_optimizer_step(PyObject* arguments) {
    PyObject* capsule = nullptr;
    PyObject* groups = nullptr;
    PyObject* state = nullptr;
    int saves = 0;
    parse(arguments, "OOOp", &capsule, &groups, &state, &saves);
    Driver& driver = driver_of(capsule);
    const Optimized found = optimized(groups, state);
    settled(driver, [&](Locked& /*lock*/) {
        driver.device.about_to_step();
        // First count all tensors that the step reads. Otherwise their memory would be attributed
        // to the step.
        each_with_memory(found.read, [&](const c10::TensorImpl& each) {
            driver.register_tensor(each);
        });
        each_with_memory(found.read, [&](const c10::TensorImpl& each) {
            driver.pin_as_constant(each);
        });
        if (saves != 0 && found.is_plain) {
            save_what_needs(driver, found.written);
        }
    });
    const auto size = static_cast<Py_ssize_t>(found.kind.size());
    return Py_BuildValue(
        "ON",
        found.is_plain ? Py_True : Py_False,
        PyBytes_FromStringAndSize(found.kind.data(), size)
    );
}

// save_before_optimizer_step(driver, groups, state) -> None
//
// Recompute and pin the values that need the current contents of the tensors that the step writes
// (R4, sources).
PyObject* save_before_optimizer_step(PyObject* arguments) {
    PyObject* capsule = nullptr;
    PyObject* groups = nullptr;
    PyObject* state = nullptr;
    parse(arguments, "OOO", &capsule, &groups, &state);
    Driver& driver = driver_of(capsule);
    const Optimized found = optimized(groups, state);
    settled(driver, [&](Locked& /*lock*/) { save_what_needs(driver, found.written); });
    return nothing();
}

}  // namespace rekindle
