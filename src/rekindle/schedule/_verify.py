"""Verify a schedule for a trace: an interpreter that performs the actions and checks each one.

This module shares no code with the planners and engines that make schedules. The events of the
trace (references, holds, reads) take place as early as the schedule permits. So before each action,
all events happen up to the next one that must wait. An event must wait if it is a call, or reads or
pins a value that is not resident.

A copy to or from the host counts as complete when the next action begins. If a bandwidth is given,
a `Timeline` computes how long the program waits for copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle._errors import InvalidSchedule
from rekindle._types import Bytes, Nanoseconds, OpId
from rekindle.policies.swap import Swap
from rekindle.schedule._actions import Action, Compute, Discard, Free, Schedule, SwapIn, SwapOut
from rekindle.schedule._timeline import Timeline
from rekindle.trace import Call, Drop, Op, Pin, Release, Retain, Trace, Use


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a valid schedule.

    Attributes:
        compute_ns: Time (ns) of the first runs of all operators.
        recompute_ns: Time (ns) of recomputed operators.
        recomputations: The number of recomputed operators.
        peak: The most bytes in use at once.
        swapped_out: Bytes copied to the host.
        swapped_in: Bytes copied back from the host.
        host_peak: The most bytes of copies on the host at once.
        waiting_ns: Time (ns) that the program waits for copies; 0 without a bandwidth.
        transfer_ns: Time (ns) of all copies; 0 without a bandwidth.
    """

    compute_ns: Nanoseconds
    recompute_ns: Nanoseconds
    recomputations: int
    peak: Bytes
    swapped_out: Bytes = 0
    swapped_in: Bytes = 0
    host_peak: Bytes = 0
    waiting_ns: Nanoseconds = 0
    transfer_ns: Nanoseconds = 0

    @property
    def total_ns(self) -> Nanoseconds:
        """The time (ns) at which the program ends."""
        return self.compute_ns + self.recompute_ns + self.waiting_ns

    @property
    def overhead(self) -> float:
        """Time lost to recomputing and waiting, as a share of `compute_ns`."""
        lost = self.recompute_ns + self.waiting_ns
        return lost / self.compute_ns if self.compute_ns else 0.0


def verify(
    trace: Trace,
    schedule: Schedule,
    budget: Bytes | None = None,
    host: Bytes | None = None,
    *,
    swap: Swap | None = None,
    evicts_held: bool = False,
) -> Cost:
    """Check that a schedule runs a trace within a budget, and return its cost.

    Args:
        trace: The recorded program: operators, storages and events.
        schedule: The actions to check.
        budget: The budget (bytes). None: no limit.
        host: The most bytes of copies on the host. None: no limit.
        swap: The bandwidth of copies, and possibly a further limit on host memory.
        evicts_held: Permit the schedule to evict storages that variables of the program hold, if
            they are resident again whenever the program reads them. The runtime does so by default
            (`evict="auto"`).

    Raises:
        InvalidSchedule: An action is not allowed. Examples: an input is not resident; memory
            exceeds the budget; a storage to free is not resident or is user-held; an operator runs
            early or never; a value is missing when the program reads it; a copy on the host is
            missing, exists already, or exceeds the limit.
    """
    if swap is not None and swap.host is not None:
        host = swap.host if host is None else min(host, swap.host)
    timeline = None if swap is None else Timeline(trace, budget, swap)
    interpreter = _Interpreter(trace, budget, host, timeline, evicts_held)
    for index, action in enumerate(schedule.actions):
        reason = interpreter.perform(action)
        if reason:
            raise InvalidSchedule(index, action, reason)
    reason = interpreter.finish()
    if reason:
        raise InvalidSchedule(len(schedule.actions), None, reason)
    return interpreter.cost()


class _Interpreter:
    """State of a verification: resident storages, references, and figures so far."""

    def __init__(
        self,
        trace: Trace,
        budget: Bytes | None,
        host: Bytes | None,
        timeline: Timeline | None,
        evicts_held: bool,
    ) -> None:
        self.evicts_held = evicts_held
        self.trace = trace
        self.budget = budget
        self.host = host
        self.timeline = timeline
        self.position = 0  # the index of the next event of the trace
        self.memory = self.peak = 0
        self.compute_ns = self.recompute_ns = self.recomputations = 0
        self.host_memory = self.host_peak = self.swapped_out = self.swapped_in = 0
        self.on_host = [False] * len(trace.storages)
        self.defined = [False] * len(trace.values)
        self.resident = [False] * len(trace.storages)
        self.held = [False] * len(trace.storages)
        self.pinned = [False] * len(trace.storages)
        self.references = [0] * len(trace.storages)
        self.ran = [False] * len(trace.ops)
        self.contents: list[list[int]] = [[] for _ in trace.storages]
        for value, storage in enumerate(trace.values):
            self.contents[storage].append(value)

    def perform(self, action: Action) -> str:
        """Perform one action. Return why the action is not allowed, or an empty text."""
        self._let_events_happen()
        memory = self.memory
        reason = self._perform(action)
        if self.timeline is not None and not reason:
            taking = isinstance(action, Compute | SwapIn)
            self.timeline.follow(action, memory if taking else self.memory)
        return reason

    def _perform(self, action: Action) -> str:
        match action:
            case Compute(op, in_place):
                return self._compute(op, in_place)
            case Free() | SwapOut() | SwapIn() | Discard() if not self._exists(action.storage):
                return f"there is no storage {action.storage}"
            case Free(storage):
                return self._free(storage)
            case SwapOut(storage, keep):
                return self._swap_out(storage, keep)
            case SwapIn(storage):
                return self._swap_in(storage)
            case Discard(storage):
                return self._discard(storage)

    def _exists(self, storage: int) -> bool:
        return 0 <= storage < len(self.resident)

    def finish(self) -> str:
        """Return why the schedule does not run the whole trace, or an empty text."""
        self._let_events_happen()
        if self.position == len(self.trace.events):
            return ""
        return f"the schedule ends before event {self.trace.events[self.position]}"

    def cost(self) -> Cost:
        return Cost(
            self.compute_ns,
            self.recompute_ns,
            self.recomputations,
            self.peak,
            self.swapped_out,
            self.swapped_in,
            self.host_peak,
            self.timeline.waiting_ns if self.timeline else 0,
            self.timeline.transfer_ns if self.timeline else 0,
        )

    def _let_events_happen(self) -> None:
        """Apply events of the trace up to the next call or read of a value that is not resident."""
        while self.position < len(self.trace.events):
            event = self.trace.events[self.position]
            if isinstance(event, Call):
                return
            storage = self.trace.values[event.value]
            match event:
                case Use() | Pin():
                    if not self.defined[event.value]:
                        return
                    if self.timeline is not None:
                        self.timeline.need(storage)
                    if isinstance(event, Use):
                        self.held[storage] = True
                    else:
                        self.pinned[storage] = True
                case Retain():
                    self.references[storage] += 1
                case Release():
                    self.references[storage] -= 1
                case Drop():
                    self.held[storage] = False
            self.position += 1

    def _free(self, storage: int) -> str:
        if not self.resident[storage]:
            return f"storage {storage} is not resident"
        if self.held[storage] and not self.evicts_held:
            return f"the program holds storage {storage}"
        if self.pinned[storage] and self.references[storage] > 0:
            return f"storage {storage} is pinned"
        self._vanish(storage)
        self.memory -= self.trace.storages[storage]
        return ""

    def _swap_out(self, storage: int, keep: bool) -> str:
        if not self.resident[storage]:
            return f"storage {storage} is not resident"
        if self.on_host[storage]:
            return f"storage {storage} is on the host already"
        nbytes = self.trace.storages[storage]
        if self.host is not None and self.host_memory + nbytes > self.host:
            over = self.host_memory + nbytes - self.host
            return f"storage {storage} exceeds the host's {self.host} by {over} bytes"
        reason = "" if keep else self._free(storage)
        if not reason:
            self.on_host[storage] = True
            self.swapped_out += nbytes
            self.host_memory += nbytes
            self.host_peak = max(self.host_peak, self.host_memory)
        return reason

    def _swap_in(self, storage: int) -> str:
        if not self.on_host[storage]:
            return f"storage {storage} is not on the host"
        if self.resident[storage]:
            return f"storage {storage} is resident already"
        nbytes = self.trace.storages[storage]
        if self.budget is not None and self.memory + nbytes > self.budget:
            over = self.memory + nbytes - self.budget
            return f"storage {storage} exceeds the budget of {self.budget} by {over} bytes"
        self.memory += nbytes
        self.peak = max(self.peak, self.memory)
        self.swapped_in += nbytes
        self.resident[storage] = True
        for value in self.contents[storage]:
            self.defined[value] = self.ran[self.trace.maker[value]]
        return ""

    def _discard(self, storage: int) -> str:
        if not self.on_host[storage]:
            return f"storage {storage} is not on the host"
        self.on_host[storage] = False
        self.host_memory -= self.trace.storages[storage]
        return ""

    def _vanish(self, storage: int) -> None:
        """Mark a storage and all its values as not resident."""
        self.resident[storage] = False
        for value in self.contents[storage]:
            self.defined[value] = False

    def _compute(self, op_id: OpId, in_place: bool) -> str:
        """Run an operator; return why that is not allowed, or an empty text."""
        if not 0 <= op_id < len(self.ran):
            return f"there is no op {op_id}"
        op = self.trace.ops[op_id]
        first = not self.ran[op_id]
        if first and self._next_call() != op_id:
            return f"op {op_id} ({op.name}) runs out of order: next is {self._next_event()}"
        if not first and not op.replayable:
            return f"op {op_id} ({op.name}) cannot be run again"
        if first and op.overwrites and not in_place:
            return f"op {op_id} ({op.name}) is run by the program itself, in place"
        for value in op.inputs:
            if not self.defined[value]:
                return f"op {op_id} ({op.name}) reads value {value}, which is not resident"
        reason = self._take_memory(op_id, op, in_place, first)
        if reason:
            return reason
        if first:
            self.ran[op_id] = True
            event = self.trace.events[self.position]
            assert isinstance(event, Call)
            self._hand_out(op, event)
            self.compute_ns += op.cost
            self.position += 1
        else:
            self.recompute_ns += op.cost
            self.recomputations += 1
        return ""

    def _take_memory(self, op_id: OpId, op: Op, in_place: bool, first: bool) -> str:
        """Add the memory of an operator; return why that is not allowed, or an empty text."""
        made = set(self.trace.new_storages(op))
        lent: set[int] = set()
        if in_place:
            lent = {self.trace.values[source] for _, source in op.overwrites}
        for storage in lent:
            if not first and (self.held[storage] or self.pinned[storage]):
                return f"op {op_id} ({op.name}) would overwrite storage {storage}, still in use"
        fresh = sum(self.trace.storages[storage] for storage in made)
        fresh -= sum(self.trace.storages[storage] for storage in lent)
        most = self.memory + fresh + op.workspace
        if self.budget is not None and most > self.budget:
            over = most - self.budget
            return f"op {op_id} ({op.name}) exceeds the budget of {self.budget} by {over} bytes"
        self.peak = max(self.peak, most)
        self.memory += fresh
        for storage in lent:
            self._vanish(storage)
        # The output was resident already, so its memory exists twice now. Free the second one.
        for storage in made:
            if self.resident[storage]:
                self.memory -= self.trace.storages[storage]
            self.resident[storage] = True
        for value in op.outputs:
            self.defined[value] = self.resident[self.trace.values[value]]
        return ""

    def _hand_out(self, op: Op, call: Call) -> None:
        """Record the first reference or hold of each output, when an operator first runs."""
        for value in op.outputs:
            if call.held:
                self.held[self.trace.values[value]] = True
            else:
                self.references[self.trace.values[value]] += 1
        for _, source in op.overwrites:
            self.held[self.trace.values[source]] = False
            self.pinned[self.trace.values[source]] = False

    def _next_event(self) -> str:
        if self.position == len(self.trace.events):
            return "the end"
        return str(self.trace.events[self.position])

    def _next_call(self) -> int:
        """Return the operator that the next event calls, or -1 if the next event is no call."""
        if self.position < len(self.trace.events):
            event = self.trace.events[self.position]
            if isinstance(event, Call):
                return event.op
        return -1
