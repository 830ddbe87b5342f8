// Passes errors between Python and C++. No error is lost, and none replaces another.
#pragma once

#include <exception>
#include <utility>

// Forward declaration of PyObject as in Python.h.
struct _object;

namespace rekindle {

// Set the Python exception types for a device OOM (`full`) and for an exceeded budget (`not_full`,
// a subclass of `full`). Must be called once.
void set_out_of_memory_types(_object* full, _object* not_full);
// Return true if `error` is the Python exception for a device out of memory.
bool is_out_of_memory(const std::exception& error);
// Return true if the program must always get `error`: KeyboardInterrupt, SystemExit, and others
// that are not an `Exception`.
bool ends_the_program(const std::exception& error) noexcept;
// Raise `error` in the main thread a moment later, because the calling function must not throw.
void raise_later(const std::exception& error) noexcept;
// Do the same with a Python error or type of error. Needs the GIL.
void raise_object_later(_object* error) noexcept;
// Attach `second`, raised after `first`, to `first` as a note. If `second` ends the program, raise
// it later instead.
void add_note(std::exception& first, const std::exception& second) noexcept;

// Set Python's current error from the C++ exception being handled. Call this in a catch block.
void set_error() noexcept;

// Run `f` in a place that must not throw, or where an earlier error takes precedence. Errors of `f`
// are ignored, except those that end the program.
template <class F>
void without_throwing(F&& f) noexcept {
    try {
        std::forward<F>(f)();
    } catch (const std::exception& error) {
        if (ends_the_program(error)) {
            raise_later(error);
        }
    }
}

// Run `f` after `first` was raised. Errors of `f` are attached to `first` as notes.
template <class F>
void after(std::exception& first, F&& f) noexcept {
    try {
        std::forward<F>(f)();
    } catch (const std::exception& error) {
        add_note(first, error);
    }
}

}  // namespace rekindle
