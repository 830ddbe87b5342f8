// Errors on their way between Python and C++: none is lost, and none takes the place of another.
#pragma once

#include <exception>
#include <utility>

// As Python.h has it.
struct _object;

namespace rekindle {

// What Python raises where a device has no more memory, and of that what it raises where the budget
// has none. Once.
void meet_out_of_memory(_object* full, _object* not_full);
// Whether it is Python's own word for a device that is full.
bool is_out_of_memory(const std::exception& error);
// Whether it has to reach the program whatever else goes on: an interrupt, or an exit; all that is
// no `Exception` of Python's.
bool ends_the_program(const std::exception& error) noexcept;
// Where nothing may be thrown: the program gets it a moment later, in its main thread.
void raise_later(const std::exception& error) noexcept;
// `first` goes on its way to the program, with a note of what went wrong after it. What ends the
// program it gets all the same.
void add_note(std::exception& first, const std::exception& second) noexcept;

// In a handler: what was caught is Python's error from now on.
void set_error() noexcept;

// Runs `f` where nothing may be thrown, or where an error is on its way already, which comes first.
// What `f` throws is dropped, but for what ends the program.
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

// Runs `f` after `first` went wrong, which comes first.
template <class F>
void after(std::exception& first, F&& f) noexcept {
    try {
        std::forward<F>(f)();
    } catch (const std::exception& error) {
        add_note(first, error);
    }
}

}  // namespace rekindle
