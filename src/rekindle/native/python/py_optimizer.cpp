#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "../base/mutex.h"
#include "../memory/evict_held_last.h"
#include "../torch/geometry.h"
#include "../torch/pyobjects.h"
#include "methods.h"

namespace rekindle {

namespace functions {

namespace {

// Scope for one nesting level of containers. Throws RecursionError at the depth at which nested
// Python calls would raise it.
class NestingLevel final {
public:
    NestingLevel() { must(Py_EnterRecursiveCall(" in the state of an optimizer") == 0); }

    NestingLevel(const NestingLevel&) = delete;
    NestingLevel& operator=(const NestingLevel&) = delete;

    ~NestingLevel() { Py_LeaveRecursiveCall(); }
};

template <class F>
void each_within(PyObject* value, F& visit);

// Visit the inner tensors of `value`, an object of a tensor subclass such as DTensor.
template <class F>
// NOLINTNEXTLINE(misc-no-recursion): containers are nested
void each_part(PyObject* value, F& visit) {
    const Object flat(PyObject_CallMethod(value, "__tensor_flatten__", nullptr));
    const Object parts(PySequence_GetItem(flat.get(), 0));
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

// Call `visit` with the Python object of each tensor in `value`, which may be a nested container or
// a tensor subclass.
template <class F>
// NOLINTNEXTLINE(misc-no-recursion): containers are nested
void each_within(PyObject* value, F& visit) {
    if (PyLong_Check(value) || PyFloat_Check(value) || value == Py_None) {
        return;
    }
    const NestingLevel deeper;
    const Object kept(Py_NewRef(value));
    if (!THPVariable_Check(value)) {
        each_item(value, visit);
        return;
    }
    const at::Tensor& tensor = THPVariable_Unpack(value);
    if (is_plain_object(*tensor.unsafeGetTensorImpl()) ||
        PyObject_HasAttrString(value, "__tensor_flatten__") == 0) {
        visit(value);
    } else {
        each_part(value, visit);
    }
}

// Finds the optimizer state of one parameter after the other. If the state is in the order of the
// parameters, as usual, no parameter has to be hashed, which would call Python code.
class States final {
public:
    explicit States(PyObject* state) : state_(state) {
        if (PyDict_Check(state_) == 0) {
            PyErr_SetString(PyExc_TypeError, "wanted the state of an optimizer as a dict");
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

// List of tensors that keeps its tensors alive. The caller holds the GIL.
class TensorList final {
public:
    TensorList() = default;
    TensorList(const TensorList&) = delete;
    TensorList& operator=(const TensorList&) = delete;

    ~TensorList() {
        for (PyObject* each : objects_) {
            Py_DECREF(each);
        }
    }

    // Add the tensor of a Python object. Keep a reference to the object, because this is much
    // faster than a reference to the tensor.
    void add(PyObject* object) {
        objects_.push_back(Py_NewRef(object));
        impls_.push_back(THPVariable_Unpack(object).unsafeGetTensorImpl());
    }

    void add(const at::Tensor& tensor) {
        tensors_.push_back(tensor);
        impls_.push_back(tensor.unsafeGetTensorImpl());
    }

    const std::vector<const c10::TensorImpl*>& all() const { return impls_; }

    // Call `act` with each tensor that has memory, in order.
    template <class F>
    void each_with_memory(F&& act) const {
        for (const c10::TensorImpl* each : impls_) {
            if (has_memory(*each)) {
                act(*each);
            }
        }
    }

private:
    std::vector<PyObject*> objects_;
    std::vector<at::Tensor> tensors_;
    std::vector<const c10::TensorImpl*> impls_;
};

struct Optimized final {
    TensorList read;  // parameters, gradients and optimizer state
    // Tensors that the optimizer step may write: parameters with a gradient, their gradients and
    // state.
    TensorList written;
    // True if all parameters are ordinary tensors, with dense gradients of the same sizes.
    bool is_plain = true;
    std::vector<std::int64_t> key;  // optimizer steps with equal keys need the same memory
};

// Append device, dtype and sizes of `tensor` to the key of a step, whose memory depends on them.
void append_shape(std::vector<std::int64_t>& key, const at::Tensor& tensor) {
    const c10::IntArrayRef sizes = tensor.sizes();
    const c10::Device where = tensor.device();
    key.push_back(
        static_cast<std::int64_t>(where.type()) |
        static_cast<std::int64_t>(where.index() + 1) << 16 |
        static_cast<std::int64_t>(tensor.scalar_type()) << 32 |
        static_cast<std::int64_t>(sizes.size()) << 40
    );
    key.insert(key.end(), sizes.begin(), sizes.end());
}

// Add a parameter with its gradient and optimizer state to `found`, and extend the key of the step.
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
        found.key.push_back(0);
        return;
    }
    const bool dense = gradient.layout() == c10::kStrided;
    found.is_plain = found.is_plain && dense && is_plain_object(*gradient.unsafeGetTensorImpl()) &&
                     gradient.sizes() == tensor.sizes();
    found.key.push_back(1);
    append_shape(found.key, tensor);
    append_shape(found.key, gradient);
    found.key.push_back(dense ? -1 : gradient._nnz());
    found.read.add(gradient);
    found.written.add(parameter);
    found.written.add(gradient);
    if (state == nullptr || PyDict_Check(state) == 0) {
        found.key.push_back(0);
        return;
    }
    found.key.push_back(PyDict_GET_SIZE(state));
    PyObject* key = nullptr;
    PyObject* item = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(state, &at, &key, &item) != 0;) {
        if (THPVariable_Check(item)) {
            found.written.add(item);
            append_shape(found.key, THPVariable_Unpack(item));
        }
    }
}

// Add the parameters of the parameter group `group` to `found`.
void add_group(PyObject* group, States& states, Optimized& found) {
    const Object listed(PyMapping_GetItemString(group, "params"));
    const Object parameters(PySequence_Fast(listed.get(), "wanted a list of parameters"));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(parameters.get()); ++i) {
        add_parameter(PySequence_Fast_GET_ITEM(parameters.get(), i), states, found);
    }
}

// Collect in `found` the tensors that an optimizer step reads and writes. `groups` and `state` are
// the optimizer's `param_groups` and `state`.
void collect(PyObject* groups, PyObject* state, Optimized& found) {
    const auto read = [&](PyObject* tensor) { found.read.add(tensor); };
    each_within(groups, read);
    each_within(state, read);
    States states(state);
    const Object all(PySequence_Fast(groups, "wanted a list of parameter groups"));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all.get()); ++i) {
        add_group(PySequence_Fast_GET_ITEM(all.get(), i), states, found);
    }
}

// Return true if values without a recipe may be moved to the host.
bool moves(const Session& session) {
    return session.held.eviction && session.held.eviction->open && session.held.eviction->moves();
}

// Count the memory of `tensors` against the budget from now on. Sources among them may be moved to
// make room for the next.
void register_all(Session& session, Locked& lock, const TensorList& tensors) {
    retry_evicting_held(session, lock, [&] {
        if (!moves(session)) {
            session.sources.register_tensors(tensors.all());
            return;
        }
        tensors.each_with_memory([&](const c10::TensorImpl& each) {
            if (StorageRecord* record = session.sources.find_or_register(each)) {
                session.held.eviction->offer(*record, each);
            }
        });
    });
}

// Drop the recipe of `tensor`, which an optimizer writes in every step. Let it be moved, or pin it.
void make_constant(Session& session, const c10::TensorImpl& tensor) {
    session.sources.pin_as_constant(tensor);
    StorageRecord* record = session.registry.find_record(tensor);
    if (moves(session) && record != nullptr) {
        session.held.eviction->offer(*record, tensor);
    }
}

// Recompute and pin the values whose recomputation needs the current contents of `written`. This
// may take the recipe of another tensor in `written`, so look again until nothing is left to save.
// Also release storages that are kept only to recompute resident values.
void save_what_needs(Session& session, const TensorList& written) {
    bool saved = false;
    do {
        saved = false;
        written.each_with_memory([&](const c10::TensorImpl& each) {
            saved = session.sources.save_what_needs(each) || saved;
        });
    } while (saved);
    // Release these storages before the optimizer step, or the step would seem to free them.
    session.room.release_recompute_sources();
}

// Return the tensors in `value`, which may be a nested container, in order.
PyObject* tensors_within(PyObject* value) {
    Object list(PyList_New(0));
    const auto add = [&](PyObject* tensor) { must(PyList_Append(list.get(), tensor) == 0); };
    each_within(value, add);
    return list.give();
}

// From now on, count the memory of the tensors in `value`, which may be a nested container.
void register_tensors(Session& session, PyObject* value) {
    TensorList found;
    const auto add = [&](PyObject* tensor) { found.add(tensor); };
    each_within(value, add);
    settled(session, [&](Locked& lock) { register_all(session, lock, found); });
}

// Count the memory of the tensors that an optimizer step reads, and make these tensors sources
// (values without a recipe), which stay in memory. If `saves` and all parameters are plain, also do
// what `save_before_optimizer_step` does. Return True if all parameters are plain, and a key that
// is equal for steps that need the same memory.
PyObject* begin_optimizer_step(Session& session, PyObject* groups, PyObject* state, bool saves) {
    Optimized found;
    collect(groups, state, found);
    rejoin();
    settled(session, [&](Locked& lock) {
        session.device.about_to_step();
        // Count all tensors that the step reads before the step, so that their memory is not
        // attributed to it.
        register_all(session, lock, found.read);
        found.read.each_with_memory([&](const c10::TensorImpl& each) {
            make_constant(session, each);
        });
        if (saves && found.is_plain) {
            save_what_needs(session, found.written);
        }
    });
    const auto size = static_cast<Py_ssize_t>(found.key.size() * sizeof(std::int64_t));
    return Py_BuildValue(
        "ON",
        found.is_plain ? Py_True : Py_False,
        PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found.key.data()), size)
    );
}

// Recompute and pin the values whose recomputation needs the current contents of the tensors that
// the optimizer step writes (R4, sources).
void save_before_optimizer_step(Session& session, PyObject* groups, PyObject* state) {
    Optimized found;
    collect(groups, state, found);
    settled(session, [&](Locked& /*lock*/) { save_what_needs(session, found.written); });
}

}  // namespace

}  // namespace functions

PyMethodDef* optimizer_methods() {
    static std::array all{
        method<functions::tensors_within>("tensors_within"),
        method<functions::register_tensors>("register_tensors"),
        method<functions::begin_optimizer_step>("begin_optimizer_step"),
        method<functions::save_before_optimizer_step>("save_before_optimizer_step"),
        PyMethodDef{},
    };
    return all.data();
}

}  // namespace rekindle
