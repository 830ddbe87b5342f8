#define PY_SSIZE_T_CLEAN
#include "copies.h"

#include <Python.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>

#include <memory>

#include "gil.h"
#include "versions.h"

namespace rekindle {

namespace {

constexpr const char* LENT = "rekindle.native.Lent";

void give_back(PyObject* capsule) {
    const std::unique_ptr<Home> kept(static_cast<Home*>(PyCapsule_GetPointer(capsule, LENT)));
}

// Keeps the memory of `home` as long as Python has it. Null: an error of Python's.
PyObject* lent(const Home& home) {
    auto kept = std::make_unique<Home>(home);
    PyObject* capsule = PyCapsule_New(kept.get(), LENT, &give_back);
    if (capsule != nullptr) {
        static_cast<void>(kept.release());
    }
    return capsule;
}

// Calls the method `name`, with a reference of its own to each object among `values`; has `take`
// look at what it returns. What either raises is thrown.
template <class F, class... Values>
void call(PyObject* object, F&& take, const char* name, const char* format, Values... values) {
    python_error raised;
    {
        const c10::impl::ExcludeDispatchKeyGuard hidden(KEY);
        PyObject* told = PyObject_CallMethod(object, name, format, values...);
        const bool done = told != nullptr && take(told);
        Py_XDECREF(told);
        if (done) {
            return;
        }
        raised.persist();
    }
    throw raised;
}

bool ignore(PyObject* /*told*/) {
    return true;
}

}  // namespace

Copies::Copies(PyObject* python) : python_(python) {
    Py_INCREF(python_);
}

Copies::~Copies() {
    if (Py_IsInitialized() != 0) {
        const Gil gil;
        Py_DECREF(python_);
    }
}

bool Copies::write(StorageId number, const Home& home) {
    const Gil gil;
    bool begun = false;
    const auto take = [&](PyObject* told) {
        begun = told == Py_True;
        return true;
    };
    auto* address = static_cast<char*>(home->mutable_data());
    const auto nbytes = static_cast<Py_ssize_t>(home->nbytes());
    const auto at = reinterpret_cast<Py_ssize_t>(address);
    call(python_, take, "write", "LNnn", static_cast<long long>(number), lent(home), at, nbytes);
    return begun;
}

std::string Copies::read(StorageId number, const Home& home) {
    const Gil gil;
    std::string why;
    const auto take = [&](PyObject* told) {
        const char* text = PyUnicode_AsUTF8(told);
        why = text == nullptr ? "" : text;
        return text != nullptr;
    };
    auto* address = static_cast<char*>(home->mutable_data());
    const auto nbytes = static_cast<Py_ssize_t>(home->nbytes());
    const auto at = reinterpret_cast<Py_ssize_t>(address);
    call(python_, take, "read", "LNnn", static_cast<long long>(number), lent(home), at, nbytes);
    return why;
}

bool Copies::ended(StorageId number) {
    const Gil gil;
    bool over = false;
    const auto take = [&](PyObject* told) {
        over = told == Py_True;
        return true;
    };
    call(python_, take, "ended", "L", static_cast<long long>(number));
    return over;
}

Copies::End Copies::wait(StorageId number) {
    const Gil gil;
    End end;
    const auto take = [&](PyObject* told) {
        const char* why = nullptr;
        long long out = 0;
        long long back = 0;
        if (PyArg_ParseTuple(told, "sLL", &why, &out, &back) == 0) {
            return false;
        }
        end = {why, out, back};
        return true;
    };
    call(python_, take, "wait", "L", static_cast<long long>(number));
    return end;
}

void Copies::release(StorageId number) {
    const Gil gil;
    call(python_, ignore, "release", "L", static_cast<long long>(number));
}

void Copies::complain_of(Bytes nbytes, const char* site, const std::string& why) {
    const Gil gil;
    call(python_, ignore, "complain_of", "Lss", static_cast<long long>(nbytes), site, why.c_str());
}

void Copies::complain() {
    const Gil gil;
    call(python_, ignore, "complain", nullptr);
}

}  // namespace rekindle
