// C++ wrapper of the Python object that stores swapped-out values on the host.
//
// A value's memory is passed to Python as a non-owning view, with the id of its engine storage as
// the key. The Python object is in rekindle.pytorch.swap._host_store.
//
// These functions take the GIL with the session mutex held (NOTE [Lock discipline], rule 2). That
// is safe, because a thread never waits for the mutex with the GIL, and the Python code never calls
// the core. Operators that the Python code runs bypass the budget, all dispatch modes and autograd.
// Threads that it starts are outside the budget. The cost of the calls does not matter, because
// transfers are rare and slow.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <string>

#include "../torch/storage_ptr.h"

// Python's `PyObject`, declared as in Python.h.
struct _object;

namespace rekindle {

class HostStore final {
public:
    // Outcome of a finished transfer. `why` is the reason if it failed, else empty. The bandwidths
    // (bytes per second) are the new estimates for each direction; 0 means unchanged.
    struct End final {
        std::string why;
        std::int64_t out_bytes_per_s = 0;
        std::int64_t in_bytes_per_s = 0;
    };

    explicit HostStore(_object* python);
    HostStore(const HostStore&) = delete;
    HostStore& operator=(const HostStore&) = delete;
    HostStore(HostStore&&) = delete;
    HostStore& operator=(HostStore&&) = delete;
    ~HostStore();

    // Record that the program uses `stream` of the device. A copy waits for the work queued on
    // `stream` before the copy, and later work waits for the copy.
    void add_stream(const c10::Stream& stream);
    // Start to copy the contents of `storage_impl`, which belongs to storage `number`, to the host.
    // Return false if the host has no room.
    bool write(StorageId number, const StoragePtr& storage_impl);
    // Start to read the copy of storage `number` into `storage_impl`, which has the same size.
    // Return the reason if that is impossible, else an empty string.
    std::string read(StorageId number, const StoragePtr& storage_impl);
    // Return true if the transfer of storage `number` has finished or failed.
    bool ended(StorageId number);
    // Wait until the transfer of storage `number` has finished. After that only the caller uses the
    // storage's memory.
    End wait(StorageId number);
    // Free the copy of storage `number`. No transfer of it is in flight.
    void release(StorageId number);
    // Record for `complain` that the copy of a value made by the operator `site` could not be
    // written or read, and `why`.
    void complain_of(Bytes nbytes, const char* site, const std::string& why);
    // Warn about the first failed transfer, unless a warning was given already. Must be called
    // without the session mutex.
    void complain();

private:
    _object* python_;
};

}  // namespace rekindle
