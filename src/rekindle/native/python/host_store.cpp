// Calls the Python object that stores swapped-out values; see memory/room/host_store.h.
#define PY_SSIZE_T_CLEAN
#include "../memory/room/host_store.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <Python.h>
#include <c10/core/Storage.h>
#include <torch/csrc/Storage.h>

#include <memory>
#include <utility>

#include "../torch/gil.h"
#include "../torch/replay_dispatch_guard.h"
#include "conversions.h"

namespace rekindle {

namespace {

// Deleter of the storage that `shared_with_python` gives to Python: releases the runtime's storage.
void give_back(void* storage_impl) {
    const std::unique_ptr<StoragePtr> kept(static_cast<StoragePtr*>(storage_impl));
}

// Return a Python storage that shares the memory of `storage_impl` and keeps `storage_impl` alive.
// A second storage is needed, because the runtime counts references to `storage_impl`, and the
// program may have a Python object for `storage_impl` already.
PyObject* shared_with_python(const StoragePtr& storage_impl) {
    auto* const kept = std::make_unique<StoragePtr>(storage_impl).release();
    c10::DataPtr there(storage_impl->mutable_data(), kept, &give_back, storage_impl->device());
    const auto size = static_cast<std::int64_t>(storage_impl->nbytes());
    return THPStorage_Wrap(c10::Storage(c10::Storage::use_byte_size_t(), size, std::move(there)));
}

// Scope in which the program's torch function modes do not see calls of PyTorch.
class WithoutFunctionModes final {
public:
    WithoutFunctionModes() : before_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
        at::impl::PythonTorchFunctionTLS::set_disabled_state(
            at::impl::TorchFunctionDisabledState::ALL_DISABLED
        );
    }

    WithoutFunctionModes(const WithoutFunctionModes&) = delete;
    WithoutFunctionModes& operator=(const WithoutFunctionModes&) = delete;

    ~WithoutFunctionModes() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before_); }

private:
    const at::impl::TorchFunctionDisabledState before_;
};

// Scope in which Ctrl-C does not interrupt the Python object of a host store. An interrupt would
// end an event of the engine half way, so that values are lost. Python raises it after the scope.
class WithoutInterrupts final {
public:
    explicit WithoutInterrupts(PyObject* store) : store_(store) {
        constexpr int most = 8;  // an interrupt may end the call itself, but not that often
        for (int times = 0; times < most && !call("defer_interrupts"); ++times) {
            came_ = true;
        }
    }

    WithoutInterrupts(const WithoutInterrupts&) = delete;
    WithoutInterrupts& operator=(const WithoutInterrupts&) = delete;

    ~WithoutInterrupts() {
        came_ = !call("admit_interrupts") || came_;
        if (came_) {
            PyErr_SetInterrupt();
        }
    }

private:
    // Call a method of the store. Return false if it raises an error.
    bool call(const char* name) noexcept {
        PyObject* const result = PyObject_CallMethod(store_, name, nullptr);
        if (result == nullptr) {
            PyErr_Clear();
            return false;
        }
        came_ = came_ || result == Py_True;
        Py_DECREF(result);
        return true;
    }

    PyObject* store_;
    bool came_ = false;
};

// Call a method of a Python object as `call_method` does, hidden from the program's dispatch modes
// and function modes.
template <class F, class... Values>
void call(PyObject* object, F&& take, const char* name, const char* format, Values... values) {
    const ReplayDispatchGuard guard(false);
    const WithoutFunctionModes unwatched;
    const WithoutCollection uncollected;
    const WithoutInterrupts uninterrupted(object);
    call_method(object, std::forward<F>(take), name, format, values...);
}

bool ignore(PyObject* /*result*/) {
    return true;
}

}  // namespace

HostStore::HostStore(PyObject* python) : python_(python) {
    Py_INCREF(python_);
}

HostStore::~HostStore() {
    if (Py_IsInitialized() != 0) {
        const Gil gil;
        Py_DECREF(python_);
    }
}

void HostStore::add_stream(const c10::Stream& stream) {
    const Gil gil;
    const auto id = static_cast<long long>(stream.id());
    // NOLINTNEXTLINE(bugprone-signed-char-misuse): a negative one is none in particular
    const int device = stream.device_index();
    call(python_, ignore, "add_stream", "Lii", id, device, static_cast<int>(stream.device_type()));
}

bool HostStore::write(StorageId number, const StoragePtr& storage_impl) {
    const Gil gil;
    const WithoutCollection uncollected;
    bool begun = false;
    const auto take = [&](PyObject* result) {
        begun = result == Py_True;
        return true;
    };
    call(
        python_,
        take,
        "write",
        "LN",
        static_cast<long long>(number),
        shared_with_python(storage_impl)
    );
    return begun;
}

std::string HostStore::read(StorageId number, const StoragePtr& storage_impl) {
    const Gil gil;
    const WithoutCollection uncollected;
    std::string why;
    const auto take = [&](PyObject* result) {
        const char* text = PyUnicode_AsUTF8(result);
        why = text == nullptr ? "" : text;
        return text != nullptr;
    };
    call(
        python_,
        take,
        "read",
        "LN",
        static_cast<long long>(number),
        shared_with_python(storage_impl)
    );
    return why;
}

bool HostStore::ended(StorageId number) {
    const Gil gil;
    bool over = false;
    const auto take = [&](PyObject* result) {
        over = result == Py_True;
        return true;
    };
    call(python_, take, "ended", "L", static_cast<long long>(number));
    return over;
}

HostStore::End HostStore::wait(StorageId number) {
    const Gil gil;
    End end;
    const auto take = [&](PyObject* result) {
        const char* why = nullptr;
        long long out = 0;
        long long back = 0;
        if (PyArg_ParseTuple(result, "sLL", &why, &out, &back) == 0) {
            return false;
        }
        end = {why, out, back};
        return true;
    };
    call(python_, take, "wait", "L", static_cast<long long>(number));
    return end;
}

void HostStore::release(StorageId number) {
    // The process may end with values that an autograd graph of this thread still has.
    if (Py_IsInitialized() == 0) {
        return;
    }
    const Gil gil;
    call(python_, ignore, "release", "L", static_cast<long long>(number));
}

void HostStore::complain_of(Bytes nbytes, const char* site, const std::string& why) {
    const Gil gil;
    call(python_, ignore, "complain_of", "Lss", static_cast<long long>(nbytes), site, why.c_str());
}

void HostStore::complain() {
    const Gil gil;
    call(python_, ignore, "complain", nullptr);
}

}  // namespace rekindle
