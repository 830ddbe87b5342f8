"""Compute the range of useful budgets of a trace, from the lifetimes of its storages.

Within a budget below `largest_need` no schedule exists. Within `keep_all_peak` no storage has to be
evicted.
"""

from __future__ import annotations

from collections.abc import Container

from rekindle._types import Bytes
from rekindle.trace._model import Call, Drop, Pin, Release, Retain, Trace, Use


class References:
    """Counter of the references to every storage, and of the program's variables that hold it.

    The caller passes the events of a trace in order.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._references = [0] * len(trace.storages)
        self._held = [False] * len(trace.storages)

    def called(self, event: Call) -> None:
        """Apply a call: each output gets an owner, and no variable holds overwritten inputs.

        The owner is a variable of the program if the call's `held` is True, else a reference.
        """
        op = self._trace.ops[event.op]
        for value in op.outputs:
            if event.held:
                self._held[self._trace.values[value]] = True
            else:
                self._references[self._trace.values[value]] += 1
        for _, source in op.overwrites:
            self._held[self._trace.values[source]] = False

    def other(self, event: Use | Retain | Release | Drop | Pin) -> None:
        """Apply an event that is not a call to the counted references and variables."""
        storage = self._trace.values[event.value]
        match event:
            case Use():
                self._held[storage] = True
            case Drop():
                self._held[storage] = False
            case Retain():
                self._references[storage] += 1
            case Release():
                self._references[storage] -= 1
            case Pin():
                pass

    def is_held_alone(self, storage: int) -> bool:
        return self._held[storage] and self._references[storage] == 0

    def is_dead(self, storage: int) -> bool:
        return self._references[storage] == 0 and not self._held[storage]


def keep_all_peak(trace: Trace) -> Bytes:
    """Return the peak (bytes) if nothing is evicted and each storage is freed when it dies."""
    references = References(trace)
    resident: set[int] = set()
    memory = peak = 0
    for event in trace.events:
        if isinstance(event, Call):
            op = trace.ops[event.op]
            taken_over = {trace.values[output]: source for output, source in op.overwrites}
            for storage in trace.new_storages(op):
                resident.add(storage)
                if storage in taken_over:
                    resident.discard(trace.values[taken_over[storage]])
                else:
                    memory += trace.storages[storage]
            peak = max(peak, memory + op.workspace)
            references.called(event)
        else:
            references.other(event)
            storage = trace.values[event.value]
            if storage in resident and references.is_dead(storage):
                resident.discard(storage)
                memory -= trace.storages[storage]
    return peak


def largest_need(trace: Trace) -> Bytes:
    """Return a lower bound (bytes) for every feasible budget.

    Each operator needs its inputs, its outputs, its workspace, and all live sources, which cannot
    be recomputed. The bound is the largest need of one operator.
    """
    return neediest(trace)[1]


def neediest(trace: Trace, in_slices: Container[str] = ()) -> tuple[str, Bytes, Bytes]:
    """Return the operator that needs most memory. `largest_need` says what an operator needs.

    Args:
        trace: The recorded program.
        in_slices: The names of operators that run in slices. They need only the live sources, and
            their results need no memory. "" is returned as their name.

    Returns:
        The name of the operator, the bytes that it needs, and how many of these bytes are
        workspace.
    """
    references = References(trace)
    sources: dict[int, Bytes] = {}
    name, most, workspace = "", 0, 0
    for event in trace.events:
        if isinstance(event, Call):
            op = trace.ops[event.op]
            taken_over = {source for _, source in op.overwrites}
            need = sum(sources.values())
            need -= sum(sources.get(trace.values[value], 0) for value in taken_over)
            whole = op.name not in in_slices
            if whole:
                inputs = {trace.values[value] for value in op.inputs if value not in taken_over}
                need += sum(trace.storages[storage] for storage in inputs if storage not in sources)
                need += trace.output_bytes(op) + op.workspace
            if need > most:
                name, most, workspace = (op.name, need, op.workspace) if whole else ("", need, 0)
            for value in taken_over:
                sources.pop(trace.values[value], None)
            if whole and not op.replayable:
                for storage in trace.new_storages(op):
                    sources[storage] = trace.storages[storage]
            references.called(event)
        else:
            references.other(event)
            storage = trace.values[event.value]
            if references.is_dead(storage):
                sources.pop(storage, None)
    return name, most, workspace
