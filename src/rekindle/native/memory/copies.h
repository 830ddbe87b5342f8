// Where values go that are swapped out, as Python has it: memory that is lent, by the number of its
// storage. The twin of what is asked is rekindle.pytorch.swap._copies.
//
// Takes the GIL with the core's lock, for moving a value is rare and long. Whoever waits for that
// lock has not got the GIL (`Mutex`), and what is called here asks the core for nothing: operators
// pass meanwhile, unseen by all modes and by autograd, and threads that it starts are not within
// the budget.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <string>

#include "../torch/homes.h"

// As Python.h has it.
struct _object;

namespace rekindle {

class Copies final {
public:
    // A transfer that is over: why it failed, if it did, and the bytes in a second that its way is
    // worth from now on; 0: nothing new.
    struct End final {
        std::string why;
        std::int64_t out_bytes_per_s = 0;
        std::int64_t in_bytes_per_s = 0;
    };

    explicit Copies(_object* python);
    Copies(const Copies&) = delete;
    Copies& operator=(const Copies&) = delete;
    Copies(Copies&&) = delete;
    Copies& operator=(Copies&&) = delete;
    ~Copies();

    // The program uses `stream` of the device: copies come after what it queues there, and that
    // after them.
    void see(const c10::Stream& stream);
    // Begins to copy what is in `home`. Returns whether it did: there may be no room.
    bool write(StorageId number, const Home& home);
    // Begins to copy what was written into `home`, of the same size. Returns why it could not.
    std::string read(StorageId number, const Home& home);
    // Whether what is under way has arrived, or never will.
    bool ended(StorageId number);
    // Until it has: the memory is the caller's again.
    End wait(StorageId number);
    // The copy is not needed any more, and nothing of it is under way.
    void release(StorageId number);
    // The copy of a value of `site` could not be made, or could not be read.
    void complain_of(Bytes nbytes, const char* site, const std::string& why);
    // Warns of what went wrong first, once. Not with the core's lock.
    void complain();

private:
    _object* python_;
};

}  // namespace rekindle
