#define PY_SSIZE_T_CLEAN
#include "python.h"

#include <Python.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "../base/without_gil.h"
#include "../memory/consulting.h"
#include "../memory/swapper.h"
#include "../ops/facts.h"
#include "../torch/gil.h"
#include "conversions.h"

namespace rekindle {

namespace {

struct Python final {
    PyObject* answers = nullptr;
    PyObject* full = nullptr;      // what it says where a device has no more memory,
    PyObject* not_full = nullptr;  // but for what it says where the budget has none
    PyTypeObject* tensor = nullptr;
    PyTypeObject* parameter = nullptr;
    PyObject* files = nullptr;  // by their names, whose code is in them
};

Python& python() noexcept {
    static Python made;
    return made;
}

// Raises the exception that the method `name` of Python's returns.
template <class... Numbers>
[[noreturn]] void raise_what(const char* name, const char* format, Numbers... numbers) {
    python_error raised;
    {
        const Gil gil;
        PyObject* error = PyObject_CallMethod(python().answers, name, format, numbers...);
        if (error != nullptr) {  // else the call itself raised
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
            Py_DECREF(error);
        }
        raised.persist();
    }
    throw raised;
}

}  // namespace

WithoutGil::WithoutGil() {
    if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
        saved_ = PyEval_SaveThread();
    }
}

WithoutGil::~WithoutGil() {
    if (saved_ != nullptr) {
        PyEval_RestoreThread(static_cast<PyThreadState*>(saved_));
    }
}

void meet_python(PyObject* answers, PyObject* tensor, PyObject* parameter) {
    Py_INCREF(answers);  // for good: drivers outlive modules
    Py_INCREF(tensor);
    Py_INCREF(parameter);
    python().answers = answers;
    python().full = PyObject_GetAttrString(answers, "full");
    python().not_full = PyObject_GetAttrString(answers, "not_full");
    TORCH_CHECK(
        python().full != nullptr && python().not_full != nullptr,
        "Python says what it raises where a device is full"
    );
    python().files = Object(PyDict_New()).give();
    python().tensor = reinterpret_cast<PyTypeObject*>(tensor);
    python().parameter = reinterpret_cast<PyTypeObject*>(parameter);
}

bool is_plain_object(const c10::TensorImpl& tensor) noexcept {
    const PyObject* object = tensor.pyobj_slot()->load_pyobj();
    if (object == nullptr) {
        return true;
    }
    const PyTypeObject* type = Py_TYPE(object);
    return type == python().tensor || type == python().parameter;
}

bool is_parameter_object(const c10::TensorImpl& tensor) noexcept {
    const PyObject* object = tensor.pyobj_slot()->load_pyobj();
    return object != nullptr && PyType_IsSubtype(Py_TYPE(object), python().parameter) != 0;
}

const void* object_of(const c10::TensorImpl& tensor) noexcept {
    return tensor.pyobj_slot()->load_pyobj();
}

namespace {

// The type and the value of what Python raised, through PyTorch's bindings or through pybind11's,
// as kernels written in Python do; null: it was not Python.
struct Raised final {
    PyObject* type = nullptr;
    PyObject* value = nullptr;
};

Raised raised_by_python(const std::exception& error) noexcept {
    if (const auto* torchs = dynamic_cast<const python_error*>(&error)) {
        return {torchs->type, torchs->value};
    }
    if (const auto* others = dynamic_cast<const pybind11::error_already_set*>(&error)) {
        return {others->type().ptr(), others->value().ptr()};
    }
    return {};
}

// Runs `ask` with those, and the GIL, if Python raised `error`.
template <class F>
bool ask_python(const std::exception& error, F&& ask) noexcept {
    if (Py_IsInitialized() == 0) {
        return false;
    }
    const Gil gil;
    const Raised raised = raised_by_python(error);
    return raised.type != nullptr && std::forward<F>(ask)(raised);
}

int raise_now(void* object) {
    auto* error = static_cast<PyObject*>(object);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
    Py_DECREF(error);
    return -1;
}

}  // namespace

bool is_out_of_memory(const std::exception& error) {
    return ask_python(error, [](const Raised& raised) {
        return PyErr_GivenExceptionMatches(raised.type, python().full) != 0 &&
               PyErr_GivenExceptionMatches(raised.type, python().not_full) == 0;
    });
}

bool ends_the_program(const std::exception& error) noexcept {
    return ask_python(error, [](const Raised& raised) {
        return PyErr_GivenExceptionMatches(raised.type, PyExc_Exception) == 0;
    });
}

void raise_later(const std::exception& error) noexcept {
    ask_python(error, [](const Raised& raised) {
        const bool whole = raised.value != nullptr && PyExceptionInstance_Check(raised.value) != 0;
        PyObject* made = whole ? Py_NewRef(raised.value) : PyObject_CallNoArgs(raised.type);
        if (made == nullptr || Py_AddPendingCall(&raise_now, made) != 0) {
            PyErr_Clear();
            PyErr_SetInterrupt();  // for one of these there always is room
        }
        return true;
    });
}

void add_note(std::exception& first, const std::exception& second) noexcept {
    if (ends_the_program(second)) {
        raise_later(second);
        return;
    }
    const std::string note = std::string("And then: ") + second.what();
    if (auto* torchs = dynamic_cast<c10::Error*>(&first)) {
        torchs->add_context(note);
        return;
    }
    ask_python(first, [&](const Raised& raised) {
        PyObject* done = PyObject_CallMethod(raised.value, "add_note", "s", note.c_str());
        if (done == nullptr) {
            PyErr_Clear();  // nothing ran that is written in Python, and could be interrupted
        }
        Py_XDECREF(done);
        return true;
    });
}

void set_error() noexcept {
    try {
        throw;
    } catch (python_error& error) {
        error.restore();
    } catch (pybind11::error_already_set& error) {
        error.restore();
    } catch (const c10::TypeError& error) {
        PyErr_SetString(PyExc_TypeError, error.what_without_backtrace());
    } catch (const c10::Error& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (...) {
        PyErr_SetString(PyExc_RuntimeError, "the native core failed; please report this");
    }
}

at::Tensor detached(const at::Tensor& tensor) {
    if (is_plain_object(*tensor.unsafeGetTensorImpl())) {
        return tensor.detach();
    }
    const Gil gil;
    PyObject* object = THPVariable_Wrap(tensor);
    PyObject* found = object == nullptr ? nullptr : PyObject_CallMethod(object, "detach", nullptr);
    Py_XDECREF(object);
    if (found == nullptr || !THPVariable_Check(found)) {
        Py_XDECREF(found);
        python_error raised;
        raised.persist();
        throw raised;
    }
    at::Tensor made = THPVariable_Unpack(found);
    Py_DECREF(found);
    return made;
}

namespace {

// Calls the method `name` of Python's, and has `take` look at what it returns; what either raises
// is thrown.
template <class F, class... Numbers>
void ask_and(F&& take, const char* name, const char* format, Numbers... numbers) {
    if (Py_IsInitialized() == 0) {
        return;
    }
    python_error raised;
    {
        const Gil gil;
        PyObject* told = PyObject_CallMethod(python().answers, name, format, numbers...);
        const bool done = told != nullptr && take(told);
        Py_XDECREF(told);
        if (done) {
            return;
        }
        raised.persist();
    }
    throw raised;
}

// Likewise, where it returns nothing of interest.
template <class... Numbers>
void ask(const char* name, const char* format, Numbers... numbers) {
    ask_and([](PyObject*) { return true; }, name, format, numbers...);
}

}  // namespace

Segments segments_of(Driver& driver) {
    Segments segments;
    const Consulting consulting(driver);
    const auto take = [&](PyObject* told) {
        for (Py_ssize_t i = 0; i < PyList_Size(told); ++i) {
            PyObject* words = PyList_GET_ITEM(told, i);
            std::vector<Block>& segment = segments.emplace_back();
            const char* at = PyBytes_AsString(words);
            for (Py_ssize_t left = PyBytes_Size(words); left > 0;) {
                std::array<std::int64_t, 3> block{};  // address, bytes, whether it is used
                std::memcpy(block.data(), at, sizeof(block));
                segment.push_back({block[0], block[1], block[2] != 0, {}});
                at += sizeof(block);
                left -= static_cast<Py_ssize_t>(sizeof(block));
            }
        }
        return true;
    };
    ask_and(take, "segments", "n", driver.number());
    return segments;
}

void tell_samples(Driver& driver) {
    driver.samples_due = false;
    ask("sample", "n", driver.number());
}

void tell_owners(Driver& driver) {
    driver.owners_due = false;
    ask("owners", "n", driver.number());
}

void tell_complaint(Driver& driver) {
    driver.swapper->complaint_due = false;
    if (Py_IsInitialized() != 0) {
        driver.swapper->copies.complain();
    }
}

void tell_losses(Driver& driver) {
    driver.look_at_losses_at = 2 * driver.recomputations;
    ask("losses", "n", driver.number());
}

void tell_places(Driver& driver) {
    driver.places_due = false;
    ask("places", "nL", driver.number(), static_cast<long long>(driver.operators()));
}

void tell_range(const Driver& driver, bool ends) {
    ask("range", "ni", driver.number(), ends ? 1 : 0);
}

void ask_for_lessons(const Driver& driver, std::int64_t met) {
    ask("lessons", "nL", driver.number(), static_cast<long long>(met));
}

namespace {

// What Python says: whether it is so.
bool is_so(const char* name, const Driver& driver) {
    bool so = false;
    const auto take = [&](PyObject* told) {
        so = told == Py_True;
        return true;
    };
    ask_and(take, name, "n", driver.number());
    return so;
}

}  // namespace

bool all_threads_are_known(const Driver& driver) {
    return is_so("all_threads_are_known", driver);
}

bool move_copies_out(const Driver& driver) {
    return is_so("move_copies_out", driver);
}

namespace {

enum class Whose : long { nobody, library, user };  // as Python's `owner_of_file` has it

// Whose code is in the file `name`. Python decides once for each file.
Whose owner_of_file(PyObject* name) {
    if (PyObject* known = PyDict_GetItemWithError(python().files, name)) {
        return static_cast<Whose>(PyLong_AsLong(known));
    }
    const Object answer(PyObject_CallMethod(python().answers, "owner_of_file", "O", name));
    must(PyDict_SetItem(python().files, name, answer.get()) == 0);
    return static_cast<Whose>(PyLong_AsLong(answer.get()));
}

// Notes where `frame` is, if that is the user's or a library's. Returns whether it is the user's.
bool note_frame(PyFrameObject* frame, ProgramLine& line) {
    const Object code(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
    PyObject* file = reinterpret_cast<PyCodeObject*>(code.get())->co_filename;
    const Whose owner = owner_of_file(file);
    const bool users = owner == Whose::user;
    if (users || (owner == Whose::library && line.library.empty())) {
        const char* name = PyUnicode_AsUTF8(file);
        must(name != nullptr);
        (users ? line.file : line.library) = name;
        (users ? line.number : line.number_in_library) = PyFrame_GetLineNumber(frame);
    }
    return users;
}

}  // namespace

ProgramLine program_line() {
    ProgramLine line;
    if (Py_IsInitialized() == 0) {
        return line;
    }
    const Gil gil;
    auto* innermost = reinterpret_cast<PyObject*>(PyEval_GetFrame());
    for (auto each = pybind11::reinterpret_borrow<pybind11::object>(innermost); each;) {
        auto* frame = reinterpret_cast<PyFrameObject*>(each.ptr());
        if (note_frame(frame, line)) {
            break;
        }
        auto* outer = reinterpret_cast<PyObject*>(PyFrame_GetBack(frame));
        each = pybind11::reinterpret_steal<pybind11::object>(outer);
    }
    return line;
}

void note_peak(Driver& driver) {
    try {
        ProgramLine line = program_line();
        {
            const Locked lock;
            driver.take_peak_snapshot(std::move(line));
        }
        if (driver.notes_places) {  // then Python has words of every snapshot
            ask("peak", "n", driver.number());
        }
    } catch (python_error& error) {
        if (ends_the_program(error)) {
            throw;
        }
        const Gil gil;
        error.restore();
        PyErr_WriteUnraisable(python().answers);
    }
}

namespace {

using Hooks = torch::autograd::SavedVariableHooks;

constexpr const char* HANDLE = "rekindle.native.Handle";

void release_handle(PyObject* capsule) {
    const std::unique_ptr<Hooks> released(
        static_cast<Hooks*>(PyCapsule_GetPointer(capsule, HANDLE))
    );
}

}  // namespace

std::pair<c10::SafePyObject, c10::SafePyObject> unpacked_by_python(std::unique_ptr<Hooks> handle) {
    python_error raised;
    {
        const Gil gil;
        PyObject* unpack = PyObject_GetAttrString(python().answers, "unpack");
        PyObject* capsule =
            unpack == nullptr ? nullptr : PyCapsule_New(handle.get(), HANDLE, &release_handle);
        if (capsule != nullptr) {
            // NOLINTNEXTLINE(bugprone-unused-return-value): the capsule has it from now on
            static_cast<void>(handle.release());
            return {{unpack, getPyInterpreter()}, {capsule, getPyInterpreter()}};
        }
        Py_XDECREF(unpack);
        raised.persist();
    }
    throw raised;
}

at::Tensor unpack(PyObject* handle) {
    auto* found = static_cast<Hooks*>(PyCapsule_GetPointer(handle, HANDLE));
    if (found == nullptr) {
        python_error raised;
        raised.persist();
        throw raised;
    }
    const WithoutGil guard;
    return found->call_unpack_hook();
}

namespace {

int say_gone(void* number) {
    PyObject* done =
        PyObject_CallMethod(python().answers, "gone", "n", reinterpret_cast<Py_ssize_t>(number));
    Py_XDECREF(done);
    return done == nullptr ? -1 : 0;
}

}  // namespace

// It may go in any thread, amid anything: the main one is told when it is safe.
void tell_gone(std::ptrdiff_t number) noexcept {
    if (Py_IsInitialized() != 0 && python().answers != nullptr) {
        // NOLINTNEXTLINE(performance-no-int-to-ptr): it takes no number
        Py_AddPendingCall(&say_gone, reinterpret_cast<void*>(number));
    }
}

bool has_attributes(const c10::TensorImpl& tensor) {
    PyObject* object = tensor.pyobj_slot()->load_pyobj();
    if (object == nullptr) {
        return false;
    }
    if (Py_TYPE(object) != python().tensor) {
        return true;
    }
    const Gil gil;
    PyObject* attributes = PyObject_GenericGetDict(object, nullptr);
    if (attributes == nullptr) {
        PyErr_Clear();  // it has none: nothing was called that is written in Python
        return false;
    }
    const bool any = PyDict_GET_SIZE(attributes) != 0;
    Py_DECREF(attributes);
    return any;
}

void Shortage::raise(Driver& driver) const {
    raise_what(
        "out_of_budget",
        "nLLLs",
        driver.number(),
        static_cast<long long>(needed),
        static_cast<long long>(memory),
        static_cast<long long>(budget),
        who.c_str()
    );
}

void Full::raise(Driver& driver) const {
    raise_what("device_full", "ns", driver.number(), said.c_str());
}

void Elsewhere::raise(Driver& driver) const {
    raise_what("met_elsewhere", "ns", driver.number(), met.str().c_str());
}

void InAGraph::raise(Driver& /*driver*/) const {
    raise_what("recomputed_in_a_graph", "s", site);
}

void Unseen::raise(Driver& /*driver*/) const {
    raise_what(by_python ? "unseen_by_python" : "unseen_collective", "s", facts->name.c_str());
}

void ChangedSize::raise(Driver& /*driver*/) const {
    const auto made = static_cast<long long>(now);
    raise_what("changed_size", "sLL", facts->name.c_str(), made, static_cast<long long>(before));
}

void ResizedInput::raise(Driver& /*driver*/) const {
    const auto there = static_cast<long long>(now);
    raise_what("resized_input", "LL", there, static_cast<long long>(before));
}

void ModifiedInput::raise(Driver& /*driver*/) const {
    const auto is = static_cast<long long>(now);
    raise_what("modified_input", "sLL", site, is, static_cast<long long>(expected));
}

void ForeignInput::raise(Driver& /*driver*/) const {
    raise_what("foreign_input", "s", site);
}

void CopyLost::raise(Driver& driver) const {
    raise_what("swap_failed", "ns", driver.number(), site.c_str());
}

void Died::raise(Driver& /*driver*/) const {
    TORCH_CHECK(false, what());
}

}  // namespace rekindle
