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

#include "../../torch/storage_ptr.h"

// Python's `PyObject`, declared as in Python.h.
struct _object;

namespace rekindle {

class HostStore final {
public:
    // Outcome of a finished transfer between device and host. `why` is the reason if it failed,
    // else empty. The bandwidths (bytes per second) are the new estimates for each direction; 0
    // means unchanged.
    struct End final {
        std::string why;
        std::int64_t out_bytes_per_s = 0;
        std::int64_t in_bytes_per_s = 0;
    };

    explicit HostStore(_object* python);
    HostStore(const HostStore&) = delete;
    HostStore& operator=(const HostStore&) = delete;
    ~HostStore();

    // Record that the program uses `stream` of the device. A copy to or from the host starts after
    // the work queued on `stream`, and later work on `stream` waits for the copy.
    void add_stream(const c10::Stream& stream);
    // Start to copy the contents of `storage_impl` to the host. Its storage has the id `number`.
    // Return false if the host has no room.
    bool write(StorageId number, const StoragePtr& storage_impl);
    // Start to read the host copy of storage `number` into `storage_impl`, which has the same size.
    // Return the reason if that is impossible, else an empty string.
    std::string read(StorageId number, const StoragePtr& storage_impl);
    // Return true if the transfer of storage `number` between device and host has finished or
    // failed.
    bool ended(StorageId number);
    // Wait until the transfer of storage `number` between device and host has finished. After that,
    // only the caller uses the storage's memory.
    End wait(StorageId number);
    // Free the host copy of storage `number`. The caller ensures that no transfer of it is in
    // flight.
    void release(StorageId number);
    // Store a complaint for `complain`: the host copy of a value of `nbytes`, made by the operator
    // `site`, could not be written or read because of `why`.
    void complain_of(Bytes nbytes, const char* site, const std::string& why);
    // Warn the user about the first failed transfer between device and host, unless a warning was
    // given already. Must be called without the session mutex.
    void complain();

private:
    _object* python_;
};

}  // namespace rekindle
