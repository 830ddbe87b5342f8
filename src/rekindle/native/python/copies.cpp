// Calls the Python object that stores swapped-out values; see memory/copies.h.
#define PY_SSIZE_T_CLEAN
#include "../memory/copies.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <Python.h>
#include <c10/core/Storage.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>

#include <memory>
#include <utility>

#include "../torch/as_the_first_time.h"
#include "../torch/gil.h"

namespace rekindle {

namespace {

// Deleter of a lent storage.
void give_back(void* home) {
    const std::unique_ptr<Home> kept(static_cast<Home*>(home));
}

// Return a Python storage with the memory of `home`, which it keeps alive. It is not `home` itself,
// because references to `home` are counted and the program has it.
PyObject* lent(const Home& home) {
    auto* const kept = std::make_unique<Home>(home).release();
    c10::DataPtr there(home->mutable_data(), kept, &give_back, home->device());
    const auto size = static_cast<std::int64_t>(home->nbytes());
    return THPStorage_Wrap(c10::Storage(c10::Storage::use_byte_size_t(), size, std::move(there)));
}

// Scope in which no torch function mode sees the calls.
class Unwatched final {
public:
    Unwatched() : before_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
        at::impl::PythonTorchFunctionTLS::set_disabled_state(
            at::impl::TorchFunctionDisabledState::ALL_DISABLED
        );
    }

    Unwatched(const Unwatched&) = delete;
    Unwatched& operator=(const Unwatched&) = delete;
    Unwatched(Unwatched&&) = delete;
    Unwatched& operator=(Unwatched&&) = delete;

    ~Unwatched() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before_); }

private:
    const at::impl::TorchFunctionDisabledState before_;
};

// Call the method `name` of `object`, and pass its result to `take`. Objects among `values` are
// consumed. Throws the Python error that either of them raises.
template <class F, class... Values>
void call(PyObject* object, F&& take, const char* name, const char* format, Values... values) {
    python_error raised;
    {
        const AsTheFirstTime guard(false);
        const Unwatched unwatched;
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

void Copies::see(const c10::Stream& stream) {
    const Gil gil;
    const auto id = static_cast<long long>(stream.id());
    // NOLINTNEXTLINE(bugprone-signed-char-misuse): a negative one is none in particular
    const int device = stream.device_index();
    call(python_, ignore, "see", "Lii", id, device, static_cast<int>(stream.device_type()));
}

bool Copies::write(StorageId number, const Home& home) {
    const Gil gil;
    bool begun = false;
    const auto take = [&](PyObject* told) {
        begun = told == Py_True;
        return true;
    };
    call(python_, take, "write", "LN", static_cast<long long>(number), lent(home));
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
    call(python_, take, "read", "LN", static_cast<long long>(number), lent(home));
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
