// The core's calls into Python, declared in memory/observers/program.h, and the conversion of the
// core's errors to Python exceptions.
#define PY_SSIZE_T_CLEAN
#include "../memory/observers/program.h"

#include <Python.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "../base/without_gil.h"
#include "../memory/notify.h"
#include "../memory/room/consulting.h"
#include "../memory/room/swapper.h"
#include "../memory/take_snapshot.h"
#include "../ops/facts.h"
#include "../torch/gil.h"
#include "../torch/raised.h"
#include "conversions.h"

namespace rekindle {

namespace {

struct Python final {
    PyObject* answers = nullptr;
    PyObject* files = nullptr;  // dict: file name -> owner of its code (`Whose`)
};

Python& python() noexcept {
    static Python made;
    return made;
}

// Call the method `name` of the Python object `answers`, and throw the exception that it returns.
template <class... Numbers>
[[noreturn]] void throw_python(const char* name, const char* format, Numbers... numbers) {
    python_error raised;
    {
        const Gil gil;
        PyObject* error = PyObject_CallMethod(python().answers, name, format, numbers...);
        if (error != nullptr) {  // if null, the call itself raised an error, thrown below
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
            Py_DECREF(error);
        }
        raised.persist();
    }
    throw raised;
}

}  // namespace

void init_callbacks(PyObject* answers) {
    // Keep a reference to `answers` forever, because sessions may outlive Python modules.
    Py_INCREF(answers);
    python().answers = answers;
    python().files = Object(PyDict_New()).give();
    const Object full(PyObject_GetAttrString(answers, "full"));
    const Object not_full(PyObject_GetAttrString(answers, "not_full"));
    set_out_of_memory_types(full.get(), not_full.get());
}

namespace {

// Call the method `name` of the Python object `answers`, as `call_method` does. Do nothing if
// Python has ended.
template <class F, class... Numbers>
void ask_and(F&& take, const char* name, const char* format, Numbers... numbers) {
    if (Py_IsInitialized() != 0) {
        const Gil gil;
        call_method(python().answers, std::forward<F>(take), name, format, numbers...);
    }
}

// Call the method `name` of the Python object `answers`, and ignore its result.
template <class... Numbers>
void ask(const char* name, const char* format, Numbers... numbers) {
    ask_and([](PyObject*) { return true; }, name, format, numbers...);
}

}  // namespace

Segments segments_of(Frees& frees) {
    Segments segments;
    const Consulting consulting(frees);
    const auto take = [&](PyObject* list) {
        const Py_ssize_t n = PyList_Size(list);
        for (Py_ssize_t i = 0; i < n; ++i) {
            char* at = nullptr;
            Py_ssize_t left = 0;
            if (PyBytes_AsStringAndSize(PyList_GET_ITEM(list, i), &at, &left) != 0) {
                return false;
            }
            std::vector<Block>& segment = segments.emplace_back();
            while (left > 0) {
                // address of a block of memory, its bytes, and 1 if it is used
                std::array<std::int64_t, 3> block{};
                std::memcpy(block.data(), at, sizeof(block));
                segment.push_back({block[0], block[1], block[2] != 0, {}});
                at += sizeof(block);
                left -= static_cast<Py_ssize_t>(sizeof(block));
            }
        }
        return n >= 0;
    };
    ask_and(take, "segments", "n", frees.registry.observers.number);
    return segments;
}

void notify_samples(Observers& observers) {
    observers.due.samples_due = false;
    ask("sample", "n", observers.number);
}

void notify_owners(Observers& observers) {
    observers.due.owners_due = false;
    ask("owners", "n", observers.number);
}

void notify_complaint(Session& session) {
    session.events.swapper->complaint_due = false;
    if (Py_IsInitialized() != 0) {
        session.events.swapper->copies.complain();
    }
}

void notify_losses(Observers& observers) {
    observers.due.look_at_losses_at = 2 * observers.recomputations;
    ask("losses", "n", observers.number);
}

void notify_places(Session& session) {
    session.observers.due.places_due = false;
    ask("places",
        "nL",
        session.observers.number,
        static_cast<long long>(session.registry.records.operators()));
}

void notify_range(const Observers& observers, bool ends) {
    ask("range", "ni", observers.number, ends ? 1 : 0);
}

void request_plans(const Observers& observers, std::int64_t op_id) {
    ask("plans", "nL", observers.number, static_cast<long long>(op_id));
}

namespace {

// Call the method `name` of the Python object `answers`. Return the text that it returns.
template <class... Texts>
std::string text_of(const char* name, const char* format, Texts... texts) {
    std::string text;
    const auto take = [&](PyObject* answer) {
        const char* found = PyUnicode_AsUTF8(answer);
        text = found == nullptr ? "" : found;
        return found != nullptr;
    };
    ask_and(take, name, format, texts...);
    return text;
}

}  // namespace

std::string watch_begins(const char* name) {
    return text_of("watch_begins", "s", name);
}

std::string watch_ends(const char* read) {
    return text_of("watch_ends", "s", read);
}

void refuse_collective(const char* name) {
    throw_python("collective_in_replay", "s", name);
}

namespace {

// Call the method `name` of the Python object `answers`. Return true if its result is True.
bool is_so(const char* name, const Observers& observers) {
    bool so = false;
    const auto take = [&](PyObject* answer) {
        so = answer == Py_True;
        return true;
    };
    ask_and(take, name, "n", observers.number);
    return so;
}

}  // namespace

bool all_threads_are_known(const Observers& observers) {
    return is_so("all_threads_are_known", observers);
}

bool move_copies_out(const Observers& observers) {
    return is_so("move_copies_out", observers);
}

namespace {

// Owners of code, with the numbers that the Python method `owner_of_file` returns.
enum class Whose : long { nobody, library, user };

// Return the owner of the code in the file `name`. Python is called once per file.
Whose owner_of_file(PyObject* name) {
    if (PyObject* known = PyDict_GetItemWithError(python().files, name)) {
        return static_cast<Whose>(PyLong_AsLong(known));
    }
    must(PyErr_Occurred() == nullptr);
    const Object answer(PyObject_CallMethod(python().answers, "owner_of_file", "O", name));
    const long whose = PyLong_AsLong(answer.get());
    must(whose != -1 || PyErr_Occurred() == nullptr);
    must(PyDict_SetItem(python().files, name, answer.get()) == 0);
    return static_cast<Whose>(whose);
}

// Write the file and line number of a Python stack frame into `line`. Skip a frame in Rekindle or
// PyTorch, and a library's frame after the first one. Return true if the frame runs the user's
// code.
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

void note_peak(Session& session) {
    try {
        ProgramLine line = program_line();
        {
            const Locked lock;
            take_peak_snapshot(session, std::move(line));
        }
        if (session.observers.due.notes_places) {  // Python also stores each snapshot as text
            ask("peak", "n", session.observers.number);
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

// Destructor of the Python capsule that wraps a saved-tensor handle.
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

// True while a call of `report_destroyed` is pending. Python has few places for pending calls, so
// one call reports all sessions that were destroyed before it.
std::atomic<bool> report_is_pending = false;

// Tell Python that sessions were destroyed. Runs in the main thread (`Py_AddPendingCall`).
int report_destroyed(void* /*nothing*/) {
    report_is_pending = false;
    PyObject* done = PyObject_CallMethod(python().answers, "gone", nullptr);
    if (done == nullptr) {
        notify_gone();  // an interrupt came first
        return -1;
    }
    Py_DECREF(done);
    return 0;
}

}  // namespace

// A session may be destroyed in any thread and under any lock. So let the main thread tell Python
// about it later, when Python can run code.
void notify_gone() noexcept {
    if (Py_IsInitialized() == 0 || python().answers == nullptr ||
        report_is_pending.exchange(true)) {
        return;
    }
    if (Py_AddPendingCall(&report_destroyed, nullptr) != 0) {
        report_is_pending =
            false;  // no place: the next session that is made or destroyed tries again
    }
}

void OutOfBudgetError::raise(Session& session) const {
    throw_python(
        "out_of_budget",
        "nLLLsLLL",
        session.observers.number,
        static_cast<long long>(needed),
        static_cast<long long>(memory),
        static_cast<long long>(budget),
        who.c_str(),
        static_cast<long long>(inside),
        static_cast<long long>(likely),
        static_cast<long long>(operands)
    );
}

void DeviceOutOfMemoryError::raise(Session& session) const {
    throw_python("device_full", "ns", session.observers.number, said.c_str());
}

void WrongDeviceError::raise(Session& session) const {
    throw_python("on_wrong_device", "ns", session.observers.number, found.str().c_str());
}

void RecomputeDuringCaptureError::raise(Session& /*session*/) const {
    throw_python("recomputed_in_a_graph", "s", site);
}

void UnsupportedOperatorError::raise(Session& /*session*/) const {
    throw_python(by_python ? "unseen_by_python" : "unseen_collective", "s", facts->name.c_str());
}

void ChangedSizeError::raise(Session& /*session*/) const {
    const auto made = static_cast<long long>(now);
    throw_python("changed_size", "sLL", facts->name.c_str(), made, static_cast<long long>(before));
}

void ResizedInputError::raise(Session& /*session*/) const {
    const auto there = static_cast<long long>(now);
    throw_python("resized_input", "LL", there, static_cast<long long>(before));
}

void GatheredInputError::raise(Session& /*session*/) const {
    throw_python("gathered_input", "Li", static_cast<long long>(nbytes), changed ? 1 : 0);
}

void ModifiedInputError::raise(Session& /*session*/) const {
    const auto is = static_cast<long long>(now);
    throw_python("modified_input", "sLL", site, is, static_cast<long long>(expected));
}

void ExternalWriteError::raise(Session& /*session*/) const {
    throw_python("foreign_input", "s", site);
}

void LostValueError::raise(Session& session) const {
    throw_python(
        "lost_value",
        "sLL",
        site,
        static_cast<long long>(nbytes),
        static_cast<long long>(session.engine.budget == UNLIMITED ? 0 : session.engine.budget)
    );
}

void SwapReadError::raise(Session& session) const {
    throw_python("swap_failed", "ns", session.observers.number, site.c_str());
}

void MissingInputError::raise(Session& /*session*/) const {
    TORCH_CHECK(false, what());
}

}  // namespace rekindle
