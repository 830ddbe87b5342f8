"""Convert a sequence of nodes (`_sequence.py`) to a schedule: add views, frees and copies.

A sequence contains no views, because its items are whole storages. Planners and searches call
`to_schedule`, or `timed_schedule` if values may be swapped to the host.
"""

from __future__ import annotations

from typing import final

from rekindle._errors import Unsupported
from rekindle._types import Bytes, Nanoseconds, OpId, StorageId, ValueId
from rekindle.planners._carrier import Carrier
from rekindle.planners._sequence import Timeline
from rekindle.policies.swap import Swap
from rekindle.schedule import Action, Compute, Discard, Free, Schedule, SwapIn, SwapOut


def to_schedule(line: Timeline, made_by: str) -> Schedule:
    """Convert a sequence without swap-ins to a schedule."""
    return timed_schedule(line, made_by, budget=None, swap=None)[0]


def timed_schedule(
    line: Timeline, made_by: str, *, budget: Bytes | None, swap: Swap | None
) -> tuple[Schedule, Nanoseconds]:
    """Convert a sequence with swap-ins to a schedule, and compute when the schedule ends.

    A storage that is swapped in later is copied to the host as soon as the direction to the host is
    idle. The swap-in starts once the direction from the host is idle and `budget` has room for the
    storage at every step until the storage is read.

    Args:
        line: The sequence of nodes, as a timeline.
        made_by: The name of the planner.
        budget: The budget (bytes); used with `swap` only.
        swap: The bandwidth to and from the host. None: the sequence has no swap-ins.

    Returns:
        The schedule, and the time (ns) at which it ends.
    """
    carrier = None if swap is None else Carrier(line, budget, swap)
    schedule = _Writer(line, carrier).write(made_by)
    return schedule, carrier.timeline.now if carrier is not None else line.cost


@final
class _Writer:
    """State of the conversion of one sequence: the actions so far, and the resident values."""

    def __init__(self, line: Timeline, carrier: Carrier | None) -> None:
        self.line = line
        self.carrier = carrier
        self.trace = line.problem.trace
        self.actions: list[Action] = []
        self.defined = [False] * len(self.trace.values)
        self.contents: list[list[ValueId]] = [[] for _ in self.trace.storages]
        for value, storage in enumerate(self.trace.values):
            self.contents[storage].append(ValueId(value))
        self.next_op = 0
        self.nodes = {op for op in line.problem.op if op is not None}

    def write(self, made_by: str) -> Schedule:
        problem, steps = self.line.problem, self.line.steps
        frees = self._frees()
        self._constants()
        for step, node in enumerate(steps):
            self._copy_ahead(step)
            if node < 0:
                self._bring_back(~node)
            elif (value := problem.value[node]) is not None:
                self._read(value)
            elif (op := problem.op[node]) is not None:
                is_first = bool(self.line.first[node] == step)
                self._save(problem.overwrites[node] if is_first else ())
                self._compute(op, is_first)
                if self.carrier is not None and is_first:
                    self.carrier.made(problem.makes[node])
                self._constants()
            # nothing is freed after the last step: the program may hold the items
            if step + 1 < len(steps):
                for item in frees[step]:
                    self._free(item)
        return Schedule(tuple(self.actions), made_by)

    def _frees(self) -> list[list[int]]:
        """Return for each step the storages to free after the step, except overwritten storages."""
        problem, steps = self.line.problem, self.line.steps
        frees: list[list[int]] = [[] for _ in steps]
        for copy in self.line.copies:
            last = steps[copy.end]
            makes = problem.makes[last] if last >= 0 else ()
            overwrites = problem.overwrites[last] if last >= 0 else ()
            overwritten = copy.item in overwrites and self.line.first[last] == copy.end
            replaced = copy.start < copy.end and copy.item in makes
            if not overwritten and not replaced:
                frees[copy.end].append(copy.item)
        return frees

    def _act(self, action: Action) -> None:
        self.actions.append(action)
        if self.carrier is not None:
            self.carrier.follow(action)

    # -- computing ------------------------------------------------------------------------------

    def _constants(self) -> None:
        """Add the next operators that make parameters, which are not nodes of the problem."""
        while self.next_op < len(self.trace.ops) and self.next_op not in self.nodes:
            self._compute(OpId(self.next_op), True)

    def _compute(self, op_id: OpId, is_first: bool) -> None:
        """Add an operator, after the views that it reads and that are not in memory."""
        op = self.trace.ops[op_id]
        for value in op.inputs:
            self._define(value)
        self._act(Compute(op_id, in_place=is_first and bool(op.overwrites)))
        for value in op.outputs:
            self.defined[value] = True
        if is_first:
            self.next_op = op_id + 1
            for _, source in op.overwrites:
                self._forget(self.trace.values[source])

    def _read(self, value: ValueId) -> None:
        self._define(value)
        if self.carrier is not None:
            self.carrier.timeline.need(self.trace.values[value])

    def _define(self, value: ValueId) -> None:
        """Add the view operators that make `value`, if its storage was recomputed without views."""
        if self.defined[value]:
            return
        if self.trace.is_root(value):
            raise ValueError(f"value {value} is read while it is not in memory")
        op_id = self.trace.maker[value]
        if not self.trace.ops[op_id].replayable:
            raise Unsupported(
                f"op {op_id} ({self.trace.ops[op_id].name}) makes a view that cannot be"
                " recomputed; hold its storage in the trace, so that it is never evicted"
            )
        self._compute(op_id, False)

    def _free(self, item: int) -> None:
        """Evict or free an item (storage), after copying it to the host if it is needed later."""
        storage = self.line.problem.storage[item]
        if storage is None:  # The item is a workspace, which schedules do not mention.
            return
        if self.carrier is not None and self.carrier.must_send(item):
            self._act(SwapOut(storage))
        else:
            self._act(Free(storage))
            if self.carrier is not None and self.carrier.spent(item):
                self._act(Discard(storage))
        self._forget(storage)

    def _forget(self, storage: StorageId) -> None:
        for value in self.contents[storage]:
            self.defined[value] = False

    # -- copying --------------------------------------------------------------------------------

    def _copy_ahead(self, step: int) -> None:
        """Start the copies to and from the host that can begin before `step`."""
        carrier = self.carrier
        if carrier is None:
            return
        while (item := carrier.departure(step)) is not None:
            self._act(SwapOut(self._storage(item), keep=True))
        while (item := carrier.arrival(step)) is not None:
            self._swap_in(item)

    def _bring_back(self, item: int) -> None:
        assert self.carrier is not None, "a swap-in needs the bandwidth of a host: give swap"
        if not self.carrier.came_ahead(item):
            self._swap_in(item)

    def _swap_in(self, item: int) -> None:
        storage = self._storage(item)
        self._act(SwapIn(storage))
        for value in self.contents[storage]:
            self.defined[value] = self.trace.maker[value] < self.next_op

    def _save(self, items: tuple[int, ...]) -> None:
        """Copy `items`, which will be overwritten, to the host if they are swapped in later."""
        for item in items:
            if self.carrier is not None and self.carrier.must_send(item):
                self._act(SwapOut(self._storage(item), keep=True))

    def _storage(self, item: int) -> StorageId:
        storage = self.line.problem.storage[item]
        assert storage is not None, "a workspace is not copied"
        return storage
