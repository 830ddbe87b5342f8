// Python module `_engine`: the native engine for the simulator and for tests. This file converts
// arguments and results; `Player` does the work.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <vector>

#include "player.h"

namespace {

using rekindle::Player;
using Words = std::span<const std::int64_t>;

enum class Ending : long { passed, no_room, thrashed, fault, malformed };

// Outcome of a replay: how the replay ended and, if it failed, numbers that describe the error.
struct End final {
    Ending ending = Ending::passed;
    std::array<std::int64_t, 4> numbers{};
    const char* what = "";
};

// Indices into the array of settings that Python passes.
enum class Setting : std::uint8_t {
    budget,  // negative: unlimited
    costs,
    by_size,
    by_staleness,
    root,
    recompute_limit,  // negative: unlimited
    watch,            // bits of `Player::Watch`: which results to record
    journal,          // number of entries to keep
    swap,             // nonzero: values can be swapped
    host,             // bytes of host memory; negative: unlimited
    out_bytes_per_s,
    in_bytes_per_s,
    swap_only,
    count,
};

// A buffer of 64-bit words, borrowed from Python.
class Buffer final {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    ~Buffer() {
        if (view_.obj != nullptr) {
            PyBuffer_Release(&view_);
        }
    }

    bool read(PyObject* object) { return PyObject_GetBuffer(object, &view_, PyBUF_SIMPLE) == 0; }

    Words words() const {
        return {
            static_cast<const std::int64_t*>(view_.buf),
            static_cast<std::size_t>(view_.len) / sizeof(std::int64_t)
        };
    }

private:
    Py_buffer view_{};
};

std::int64_t at(Words settings, Setting setting) {
    return settings[static_cast<std::size_t>(setting)];
}

std::int64_t or_most(std::int64_t number) {
    return number < 0 ? rekindle::UNLIMITED : number;
}

rekindle::Policy policy_of(Words settings) {
    return {
        static_cast<rekindle::Costs>(at(settings, Setting::costs)),
        at(settings, Setting::by_size) != 0,
        at(settings, Setting::by_staleness) != 0,
        at(settings, Setting::root) != 0
    };
}

rekindle::Swap swap_of(Words settings) {
    return {
        or_most(at(settings, Setting::host)),
        at(settings, Setting::out_bytes_per_s),
        at(settings, Setting::in_bytes_per_s),
        at(settings, Setting::swap_only) != 0
    };
}

End found(const rekindle::Fault& fault) {
    return {Ending::fault, {fault.storage, 0, 0, 0}, fault.what};
}

// Replay the events in `words`. Errors of the engine become part of the returned outcome.
End play(Player& player, Words words, std::int64_t watch) {
    End end;
    try {
        if (const std::optional<rekindle::Fault> fault = player.play(words); fault) {
            return found(*fault);
        }
    } catch (const rekindle::NoRoom& shortage) {
        const std::int64_t call = shortage.call ? shortage.call->id : -1;
        end = {Ending::no_room, {shortage.needed, shortage.memory, shortage.budget, call}, ""};
    } catch (const rekindle::Thrashed& thrashed) {
        end = {Ending::thrashed, {thrashed.recompute_ns, thrashed.limit, 0, 0}, ""};
    } catch (const rekindle::Malformed& malformed) {
        return {Ending::malformed, {static_cast<std::int64_t>(malformed.position), 0, 0, 0}, ""};
    }
    if ((watch & Player::check) != 0) {
        if (const std::optional<rekindle::Fault> fault = player.engine().check(); fault) {
            return found(*fault);
        }
    }
    return end;
}

template <class T>
PyObject* bytes_of(const std::vector<T>& numbers) {
    return PyBytes_FromStringAndSize(
        static_cast<const char*>(static_cast<const void*>(numbers.data())),
        static_cast<Py_ssize_t>(numbers.size() * sizeof(T))
    );
}

PyObject* result_of(Player& player, const End& end) {
    const rekindle::Engine& engine = player.engine();
    std::vector<rekindle::Entry> journal;
    engine.journal.each([&](const rekindle::Entry& entry) { journal.push_back(entry); });
    const auto big = [](std::int64_t number) { return static_cast<long long>(number); };
    return Py_BuildValue(
        "l(LLLLs)(LLLLLLLL)NNNNN",
        static_cast<long>(end.ending),
        big(end.numbers[0]),
        big(end.numbers[1]),
        big(end.numbers[2]),
        big(end.numbers[3]),
        end.what,
        big(engine.memory),
        big(engine.peak),
        big(engine.clock),
        big(engine.compute_ns),
        big(engine.recompute_ns),
        big(player.evictions),
        big(player.recomputations),
        big(static_cast<std::int64_t>(player.bookkeeping())),
        bytes_of(player.actions),
        bytes_of(player.clock),
        bytes_of(player.memory),
        bytes_of(player.steps),
        bytes_of(journal)
    );
}

bool read_route(PyObject* given, rekindle::Route& route) {
    const std::array<std::vector<std::int64_t>*, 6> parts{
        &route.stops, &route.moves, &route.restores, &route.restored, &route.kept, &route.copies
    };
    for (std::size_t i = 0; i < parts.size(); ++i) {
        Buffer buffer;
        PyObject* part = PyTuple_GetItem(given, static_cast<Py_ssize_t>(i));
        if (part == nullptr || !buffer.read(part)) {
            return false;
        }
        const Words words = buffer.words();
        parts.at(i)->assign(words.begin(), words.end());
    }
    return true;
}

PyObject* replay_given(PyObject* stream, PyObject* given, PyObject* given_route) {
    Buffer words;
    Buffer settings;
    rekindle::Route route;
    if (!words.read(stream) || !settings.read(given) ||
        (given_route != Py_None && !read_route(given_route, route))) {
        return nullptr;
    }
    if (settings.words().size() != static_cast<std::size_t>(Setting::count)) {
        PyErr_SetString(PyExc_ValueError, "the settings have a wrong length");
        return nullptr;
    }
    const Words chosen = settings.words();
    const std::int64_t watch = at(chosen, Setting::watch);
    const rekindle::Swap swap = swap_of(chosen);
    Player player(
        or_most(at(chosen, Setting::budget)),
        policy_of(chosen),
        or_most(at(chosen, Setting::recompute_limit)),
        given_route != Py_None ? &route : nullptr,
        at(chosen, Setting::swap) != 0 ? &swap : nullptr,
        watch
    );
    player.engine().journal.open(static_cast<std::size_t>(at(chosen, Setting::journal)));
    PyThreadState* const state = PyEval_SaveThread();
    End end;
    std::exception_ptr failed;
    try {
        end = play(player, words.words(), watch);
    } catch (const std::bad_alloc&) {
        failed = std::current_exception();
    }
    PyEval_RestoreThread(state);
    if (failed) {
        std::rethrow_exception(failed);
    }
    if (end.ending == Ending::malformed) {
        PyErr_Format(PyExc_ValueError, "word %lld: not understood", end.numbers[0]);
        return nullptr;
    }
    return result_of(player, end);
}

PyObject* replay(PyObject* /*module*/, PyObject* arguments) {
    PyObject* stream = nullptr;
    PyObject* settings = nullptr;
    PyObject* route = Py_None;
    if (PyArg_ParseTuple(arguments, "OO|O", &stream, &settings, &route) == 0) {
        return nullptr;
    }
    try {
        return replay_given(stream, settings, route);
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
}

PyModuleDef* definition() {
    static std::array<PyMethodDef, 2> methods{{
        {"replay", replay, METH_VARARGS, "replay(words, settings, route=None) -> tuple"},
        {nullptr, nullptr, 0, nullptr},
    }};
    static PyModuleDef module{
        PyModuleDef_HEAD_INIT,
        "_engine",
        nullptr,
        0,
        methods.data(),
        nullptr,
        nullptr,
        nullptr,
        nullptr
    };
    return &module;
}

}  // namespace

// NOLINTNEXTLINE(readability-identifier-naming, bugprone-reserved-identifier): Python names it.
PyMODINIT_FUNC PyInit__engine() {
    return PyModule_Create(definition());
}
