// What Python is notified of after an operator, once the session mutex is released.
#pragma once

#include <cstdint>
#include <vector>

namespace rekindle {

// Notifications that are due. The driver sets them, and `notify` (memory/program.h) delivers and
// clears them. The caller holds the session mutex, except that `notify` reads the flags without it:
// a flag that it misses is delivered after the next operator.
struct Notifications final {
    bool samples_due = false;  // the buffer of memory samples is full: Python should fetch them
    bool owners_due = false;   // Python should look up the models that own `new_parameters`
    bool places_due = false;   // operators ran that Python was not notified of yet
    // Python wants to know of every operator, to note the current line of the program.
    bool notes_places = false;
    // True during an optimizer step that can be undone. Python then wants to know of the profiler's
    // ranges.
    bool tell_ranges = false;
    // Number of recomputations at which Python next checks whether they take too much time.
    std::int64_t look_at_losses_at = 10'000;
    std::vector<const void*> new_parameters;  // storages of weights seen for the first time
};

}  // namespace rekindle
