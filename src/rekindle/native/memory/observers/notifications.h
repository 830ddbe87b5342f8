// Notifications for Python that are delivered after an operator, once the session mutex (the one
// lock of the native core) is released.
#pragma once

#include <cstdint>
#include <vector>

namespace rekindle {

// Notifications for Python that are due. The parts of a budget set these flags, and `notify`
// (memory/notify.h) delivers and clears them. Set the flags only while holding the
// session mutex, the one lock of the native core. Only `notify` reads the flags without the mutex.
// If it misses a flag, the notification is delivered after the next operator.
struct Notifications final {
    bool samples_due = false;  // the buffer of memory samples is full: Python should fetch them
    bool owners_due = false;   // Python should look up the models that own `new_parameters`
    // Python should also look up the running model when autograd saves a tensor: the model was made
    // inside the budget, so none of its weights is seen for the first time.
    bool models_due = false;
    bool places_due = false;  // operators ran of which Python was not notified yet
    // Python wants to know of every operator, to note the current line of the program.
    bool notes_places = false;
    // True during an optimizer step that can be undone. Python then needs to know of the ranges
    // that PyTorch's profiler records.
    bool tell_ranges = false;
    // Number of recomputations at which Python next checks whether recomputation takes too much
    // time.
    std::int64_t look_at_losses_at = 10'000;
    std::vector<const void*> new_parameters;  // storages of weights seen for the first time
};

}  // namespace rekindle
