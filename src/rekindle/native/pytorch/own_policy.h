// A policy written in Python: the engine's events go to an object of the program's, which chooses.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <atomic>
#include <optional>
#include <unordered_map>

#include "../engine/chooser.h"

// As Python.h has it.
struct _object;

namespace rekindle {

// Twin of the base class in rekindle.policies._base. Its methods are called with the core's lock,
// and take the GIL: whoever waits for the lock does so without the GIL. An error of Python's must
// not leave the engine amid an event: it is kept, and `choose` or `raise_error` throw it.
class PythonChooser final : public Chooser {
public:
    // `object`: a `rekindle.policies.Chooser`. With the GIL.
    explicit PythonChooser(_object* object);
    PythonChooser(const PythonChooser&) = delete;
    PythonChooser& operator=(const PythonChooser&) = delete;
    PythonChooser(PythonChooser&&) = delete;
    PythonChooser& operator=(PythonChooser&&) = delete;
    ~PythonChooser() override;

    bool remembers() const override { return remembers_; }

    void add(Storage& storage) override { call("add", storage); }

    void remove(Storage& storage) override { call("remove", storage); }

    // Throws what Python raised, here or in an event before.
    Storage* choose(Nanoseconds now) override;
    Nanoseconds recompute_ns(Storage& storage) override;

    void expected(Storage& storage) override { call("expected", storage); }

    void evicted(Storage& storage) override { call("evicted", storage); }

    void returned(Storage& storage) override { call("returned", storage); }

    void forgotten(Storage& storage) override { call("forgotten", storage); }

    void touched(Storage& storage) override { call("touched", storage); }

    void repriced(Storage& storage) override { call("repriced", storage); }

    void disposed(Storage& storage) noexcept override;

    // Throws the error that an event met, once. Without the core's lock.
    void raise_error() {
        if (failed_.load(std::memory_order_relaxed)) {
            raise_error_now();
        }
    }

    // What Python knows `storage` by, one object as long as it lives; a borrowed reference. With
    // the core's lock and the GIL; null: Python raised.
    _object* view_of(Storage& storage);

private:
    void call(const char* method, Storage& storage);
    void keep_error();
    void throw_error();
    void raise_error_now();

    _object* object_;
    bool remembers_ = false;
    std::unordered_map<const Storage*, _object*> views_;
    std::optional<python_error> error_;  // the first that nobody has seen yet
    std::atomic<bool> failed_ = false;   // whether there is one
};

}  // namespace rekindle
