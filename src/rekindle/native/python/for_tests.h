// What only tests ask of the module: to see what happened, and to make it go wrong.
#pragma once

#include "conversions.h"

namespace rekindle {

// let_go_now(driver): of all that may be
PyObject* let_go_now(PyObject* arguments);
// bytes_of_positions() -> of all generators, as recipes keep them
PyObject* bytes_of_positions(PyObject* arguments);
// longest_chain(driver, calls)
PyObject* longest_chain(PyObject* arguments);
// count_again(driver): from now on, `again` tells
PyObject* count_again(PyObject* arguments);
// again(driver) -> the names of the operators that ran again
PyObject* again(PyObject* arguments);
// in_flight(driver) -> how many operators run, and what they take
PyObject* in_flight(PyObject* arguments);
// has_lock() -> whether this thread has the session's mutex
PyObject* has_lock(PyObject* arguments);
// bytes_asked_for(words) -> the bytes that an allocator wanted when it said this
PyObject* bytes_asked_for(PyObject* arguments);
// window([(address, bytes, used, loss or None)], bytes) -> the loss, the first and the last of the
// neighbors that go, or None
PyObject* window(PyObject* arguments);
// take_out(driver, what): "in_order", "keep_until_read", "may_differ", "kept_back" or
// "cheapest_neighbors", of the device; "fitted": a device that has less than the budget says does
// not lower it; "took" and "guess", of workspaces; or "ahead": nothing is copied to the host that
// may stay
PyObject* take_out(PyObject* arguments);
// fitted(driver, bytes): a device that has less than the budget says had so much
PyObject* fitted(PyObject* arguments);
// interrupt(driver, after how many replays, before or after it)
PyObject* interrupt(PyObject* arguments);
// refuse(driver, after how many operators; negative: never) -> how many were left until then
PyObject* refuse(PyObject* arguments);
// fix_costs(nanoseconds): of every signature; negative: they are measured
PyObject* fix_costs(PyObject* arguments);
// open_journal(driver, entries)
PyObject* open_journal(PyObject* arguments);
// journal(driver) -> [(kind, id, number, flags, clock, memory)], oldest first
PyObject* journal(PyObject* arguments);
// remembered(driver) -> how many operators of the step that runs
PyObject* remembered(PyObject* arguments);
// remember_at_most(driver, operators)
PyObject* remember_at_most(PyObject* arguments);
// tally(whether): from now on all that the CPU's allocator gives out is added up
PyObject* tally(PyObject* arguments);
// tallied() -> bytes that were not returned so far, and the most at once since this was last asked
PyObject* tallied(PyObject* arguments);
// places_in(shape, step) -> which operators of the shape those of the step are, or None
PyObject* places_in(PyObject* arguments);

}  // namespace rekindle
