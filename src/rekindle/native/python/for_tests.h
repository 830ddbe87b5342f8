// Module functions that only tests call: they inspect the core, or make it fail.
#pragma once

#include "conversions.h"

namespace rekindle {

// evict_all(driver) -> None
//
// Evict every value that may be evicted.
PyObject* evict_all(PyObject* arguments);
// bytes_of_positions() -> int
//
// Return the bytes of random generator states that recipes keep.
PyObject* bytes_of_positions(PyObject* arguments);
// longest_chain(driver, calls) -> None
//
// Set the length at which a chain of recipes is cut.
PyObject* longest_chain(PyObject* arguments);
// list_recomputed_ops(driver) -> None
//
// Start to list recomputed operators for `recomputed_ops`.
PyObject* list_recomputed_ops(PyObject* arguments);
// recomputed_ops(driver) -> list[str]
//
// Return the names of the operators that were recomputed since `list_recomputed_ops`.
PyObject* recomputed_ops(PyObject* arguments);
// in_flight(driver) -> (int, int)
//
// Return the number of operators that run now, and the bytes of their results and workspaces.
PyObject* in_flight(PyObject* arguments);
// has_lock() -> bool
//
// Return True if this thread has the session mutex.
PyObject* has_lock(PyObject* arguments);
// bytes_asked_for(text) -> int
//
// Return the bytes that a failed allocation requested, as its error message `text` says.
PyObject* bytes_asked_for(PyObject* arguments);
// window(blocks, nbytes) -> (loss, first, last) | None
//
// Return which adjacent blocks are cheapest to evict to free `nbytes`, as the indices of the first
// and the last. `blocks`: list of (address, bytes, used, loss or None).
PyObject* window(PyObject* arguments);
// disable_for_tests(driver, name) -> None
//
// Disable one feature, to show that a test fails without it. Features of the device: "in_order",
// "readers_wait", "writers_wait", "keep_until_read", "may_differ", "kept_back", "find_place",
// "cheapest_neighbors". Of workspaces: "took", "guess". "fitted": lower the budget after a device
// OOM. "ahead": copy values to the host before room is needed.
PyObject* disable_for_tests(PyObject* arguments);
// in_place(driver) -> (int, int or None)
//
// Return the number of calls whose result was written over a gradient, and the smallest reference
// count seen of a gradient whose storage had no other owner.
PyObject* in_place(PyObject* arguments);
// fitted(driver, nbytes) -> None
//
// Lower the budget as after a device OOM, as if only `nbytes` had fit on the device.
PyObject* fitted(PyObject* arguments);
// interrupt(driver, replays, before) -> None
//
// Let `replays` recomputations succeed, and raise an error in the next one, before or after its
// kernel runs.
PyObject* interrupt(PyObject* arguments);
// refuse(driver, operators) -> int
//
// Let `operators` more operators run, and then raise `OutOfBudget`; negative: never. Return how
// many operators were left from the previous call.
PyObject* refuse(PyObject* arguments);
// fix_costs(ns) -> None
//
// Use `ns` as the cost of every signature; negative: measure costs again.
PyObject* fix_costs(PyObject* arguments);
// open_journal(driver, entries) -> None
//
// Start to keep the last `entries` entries of the engine's journal.
PyObject* open_journal(PyObject* arguments);
// journal(driver) -> list of (kind, id, number, flags, clock, memory)
//
// Return the entries of the journal, the oldest first.
PyObject* journal(PyObject* arguments);
// remembered(driver) -> int
//
// Return the number of operators that the learner has noted in the running step.
PyObject* remembered(PyObject* arguments);
// remember_at_most(driver, operators) -> None
//
// Set the number of operators up to which a step follows learned plans.
PyObject* remember_at_most(PyObject* arguments);
// tally(on) -> None
//
// Start or stop counting the bytes that PyTorch's CPU allocator gives out.
PyObject* tally(PyObject* arguments);
// tallied() -> (int, int)
//
// Return the bytes that the CPU allocator has given out now, and their peak since the last call.
// See `tally`.
PyObject* tallied(PyObject* arguments);
// places_in(shape, step) -> list[int] | None
//
// Return the index in `shape` of each operator of `step`; see `places` in steps/sequence_matcher.h.
PyObject* places_in(PyObject* arguments);

}  // namespace rekindle
