// Python module functions that only tests call, to inspect the native core or to make it fail.
#pragma once

#include "conversions.h"

namespace rekindle {

// evict_all(driver) -> None
//
// Evict all values that may be evicted.
PyObject* evict_all(PyObject* arguments);
// bytes_of_positions() -> int
//
// Return the bytes of the states of random number generators that recipes keep.
PyObject* bytes_of_positions(PyObject* arguments);
// longest_chain(driver, calls) -> None
//
// Set the longest permitted chain of recipes, each of which reads the result of the previous one.
PyObject* longest_chain(PyObject* arguments);
// count_only(driver, operators) -> None
//
// Only count the next `operators` operators, also if memory is not far below the budget.
PyObject* count_only(PyObject* arguments);
// counts_only(driver) -> bool
//
// Return True if operators are only counted now.
PyObject* counts_only(PyObject* arguments);
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
// Return the number of operators that are running, and the bytes of their results and workspaces.
PyObject* in_flight(PyObject* arguments);
// has_lock() -> bool
//
// Return True if this thread has the session mutex.
PyObject* has_lock(PyObject* arguments);
// openings() -> int
//
// Return the number of threads that have opened the session mutex to run user code.
PyObject* openings(PyObject* arguments);
// bytes_asked_for(text) -> int
//
// Return the bytes that a failed allocation requested, read from its error message `text`.
PyObject* bytes_asked_for(PyObject* arguments);
// window(blocks, nbytes) -> (loss, first, last) | None
//
// Find the adjacent blocks of memory that are cheapest to evict to free `nbytes`. Return their
// cost, and the indices of the first and the last block. `blocks`: list of (address, bytes, used,
// loss or None).
PyObject* window(PyObject* arguments);
// disable_for_tests(driver, name) -> None
//
// Disable one feature, so that a test can show that it fails without this feature. Features of the
// device: "in_order", "readers_wait", "writers_wait", "keep_until_read", "may_differ", "kept_back",
// "find_place", "cheapest_neighbors". Features of workspaces: "took", "guess". "fitted": lower the
// budget after a device OOM. "ahead": copy values to the host before room is needed. "in_place":
// write results over gradients.
PyObject* disable_for_tests(PyObject* arguments);
// in_place(driver) -> (int, int or None)
//
// Return the number of operator calls whose result was written over a gradient. Also return the
// smallest reference count of any gradient whose storage had no other owner.
PyObject* in_place(PyObject* arguments);
// fitted(driver, nbytes) -> None
//
// Lower the budget as the runtime does after a device OOM, as if only `nbytes` had fit.
PyObject* fitted(PyObject* arguments);
// interrupt(driver, replays, before) -> None
//
// Let `replays` recomputations succeed, and raise an error in the next recomputation. `before`:
// raise it before the kernel runs, not after.
PyObject* interrupt(PyObject* arguments);
// refuse(driver, operators) -> int
//
// Let `operators` more operators run, and raise `OutOfBudget` in the next one. Negative: never
// raise it. Return how many operators were left from the previous call.
PyObject* refuse(PyObject* arguments);
// underestimated() -> int
//
// Return how many calls of this process had larger results than `most_bytes` says.
PyObject* underestimated(PyObject* arguments);
// fix_costs(ns) -> None
//
// Use `ns` as the cost of every operator. Negative: measure costs again.
PyObject* fix_costs(PyObject* arguments);
// set_clock_speed(factor, seed) -> None
//
// Multiply all durations that the core measures from now on; see `set_clock_speed` in base/clock.h.
PyObject* set_clock_speed(PyObject* arguments);
// open_journal(driver, entries) -> None
//
// Start to keep the last `entries` entries of the engine's journal of events.
PyObject* open_journal(PyObject* arguments);
// journal(driver) -> list of (kind, id, number, flags, clock, memory)
//
// Return the entries of the engine's journal of events, the oldest first.
PyObject* journal(PyObject* arguments);
// remembered(driver) -> int
//
// Return the number of operators that the `Learner` has recorded in the running step.
PyObject* remembered(PyObject* arguments);
// remember_at_most(driver, operators) -> None
//
// Set the most operators of a step that may still follow a learned plan.
PyObject* remember_at_most(PyObject* arguments);
// tally(on) -> None
//
// Start or stop counting the bytes that PyTorch's CPU allocator has allocated.
PyObject* tally(PyObject* arguments);
// tallied() -> (int, int)
//
// Return the bytes that the CPU allocator has allocated since `tally` and not freed. Also return
// their peak since the last call of this function.
PyObject* tallied(PyObject* arguments);
// places_in(shape, step) -> list[int] | None
//
// Return for each operator of `step` its index in `shape`, the operators of a recorded step; see
// `places` in steps/sequence_matcher.h.
PyObject* places_in(PyObject* arguments);
// unwritten_bytes(nbytes, writes) -> bytes | None
//
// Return a byte of 1 for each unwritten byte of a storage made by `empty`, else 0. None: too many
// boxes were left. `writes`: tuples of the tensor that an operator wrote, and the tensor in the
// same storage that it copied, or None.
PyObject* unwritten_bytes(PyObject* arguments);

}  // namespace rekindle
