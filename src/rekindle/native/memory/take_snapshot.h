// Takes snapshots: which storages hold memory now.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "observers/snapshot.h"
#include "session.h"

namespace rekindle {

// Note that autograd unpacks a value, in a backward pass that may be a new one.
void note_backward_pass(Session& session);
// Write into `snapshot` which storages hold memory. This visits every storage, so it is expensive.
void take_snapshot(Session& session, Snapshot& snapshot, ProgramLine line);
// Take the snapshot of the memory peak again, if memory in use has grown clearly since the last
// such snapshot.
void take_peak_snapshot(Session& session, ProgramLine line);
// Take a snapshot of the storages in memory now, and again at each new peak of `nbytes` or more.
void expect_peak(Session& session, Bytes nbytes, ProgramLine line);
// Write into `snapshot` that the memory of `tensor`, if it has any, is of `kind`, such as a
// gradient or an optimizer state.
void add_owned(
    Session& session,
    Snapshot& snapshot,
    const c10::TensorImpl& tensor,
    Owned::Kind kind,
    const void* parameter
);
// Return the tensors by which the program refers to values that are in memory and have a record,
// the oldest first.
std::vector<at::Tensor> program_tensors(Session& session);
// Return the bytes of the evicted values to which the program or autograd still refers.
Bytes evicted_bytes(const Session& session);

}  // namespace rekindle
