"""A plan before it is written down: nodes in the order in which they are computed.

The first occurrence of a node is its first computation. Nothing else needs to be said: given the
order, the best moment to free a copy of an item is right after its last reader before the item is
made again. From that follow the memory at every step and the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from rekindle._errors import Unsupported
from rekindle._types import Bytes, Nanoseconds, OpId, StorageId, ValueId
from rekindle.planners._problem import Hold, Problem
from rekindle.schedule import Action, Compute, Free, Schedule


@final
@dataclass(frozen=True, slots=True)
class Copy:
    """One life of an item: made at step `start`, last needed at step `end`."""

    item: int
    start: int
    end: int


@final
@dataclass(frozen=True)
class Timeline:
    """A sequence, the copies of items that it makes, and the memory while each step runs."""

    problem: Problem
    steps: tuple[int, ...]
    copies: tuple[Copy, ...]
    memory: NDArray[np.int64]
    first: NDArray[np.int64]
    """The step of each node's first computation."""

    @property
    def peak(self) -> Bytes:
        return int(self.memory.max(initial=self.problem.fixed))

    @property
    def cost(self) -> Nanoseconds:
        return cost_of(self.problem, self.steps)


def cost_of(problem: Problem, steps: Iterable[int]) -> Nanoseconds:
    return sum(problem.cost[node] for node in steps)


def timeline(problem: Problem, steps: Sequence[int]) -> Timeline:
    """Follows every item through `steps`; raises ValueError where an item is read that is gone."""
    made: dict[int, int] = {}  # the step at which the present copy of an item was made
    needed: dict[int, int] = {}  # the step at which that copy was last read
    first = np.full(len(problem), len(steps), dtype=np.int64)
    copies: list[Copy] = []
    freed_by_lending: list[tuple[int, int]] = []
    held: dict[int, int] = {}  # items on hold, and the node that ends the hold
    starting: dict[int, list[Hold]] = {}
    for hold in problem.holds:
        starting.setdefault(hold.first, []).append(hold)

    for step, node in enumerate(steps):
        is_first = first[node] == len(steps)
        for item in problem.reads[node]:
            if item not in made:
                raise ValueError(f"step {step} runs node {node}, but item {item} is gone")
            needed[item] = step
        for item in problem.makes[node]:
            if item in made:
                end = step if item in held else needed[item]
                copies.append(Copy(item, made[item], end))
            made[item] = needed[item] = step
        if is_first:
            first[node] = step
            for item in problem.lends[node]:
                copies.append(Copy(item, made.pop(item), step))
                freed_by_lending.append((step, item))
                held.pop(item, None)
            for item in [item for item, last in held.items() if last == node]:
                needed[item] = step
                del held[item]
            for hold in starting.get(node, ()):
                held[hold.item] = max(hold.last, held.get(hold.item, 0))
    copies += [Copy(item, start, needed[item]) for item, start in made.items()]
    memory = _memory(problem, steps, copies, freed_by_lending)
    return Timeline(problem, tuple(steps), tuple(copies), memory, first)


def _memory(
    problem: Problem,
    steps: Sequence[int],
    copies: Sequence[Copy],
    lent: Sequence[tuple[int, int]],
) -> NDArray[np.int64]:
    change = np.zeros(len(steps) + 1, dtype=np.int64)
    sizes = np.array([problem.nbytes[copy.item] for copy in copies], dtype=np.int64)
    np.add.at(change, np.array([copy.start for copy in copies], dtype=np.int64), sizes)
    np.subtract.at(change, np.array([copy.end + 1 for copy in copies], dtype=np.int64), sizes)
    for step, item in lent:  # taken over by the output of the same step, not counted beside it
        change[step] -= problem.nbytes[item]
        change[step + 1] += problem.nbytes[item]
    return np.cumsum(change[:-1]) + problem.fixed


def prune(problem: Problem, steps: Sequence[int]) -> list[int]:
    """Without the recomputations of which nobody reads anything before it is made again."""
    first: dict[int, int] = {}
    for step, node in enumerate(steps):
        first.setdefault(node, step)
    kept: list[int] = []
    wanted: set[int] = set()
    for step in range(len(steps) - 1, -1, -1):
        node = steps[step]
        if first[node] == step or any(item in wanted for item in problem.makes[node]):
            kept.append(node)
            wanted.difference_update(problem.makes[node])
            wanted.update(problem.reads[node])
    kept.reverse()
    return kept


def to_schedule(line: Timeline, made_by: str) -> Schedule:
    """The actions of a sequence: what it computes, views again where they are read, frees."""
    return _Writer(line).write(made_by)


class _Writer:
    def __init__(self, line: Timeline) -> None:
        self.line = line
        self.trace = line.problem.trace
        self.actions: list[Action] = []
        self.defined = [False] * len(self.trace.values)
        self.contents: list[list[ValueId]] = [[] for _ in self.trace.storages]
        for value, storage in enumerate(self.trace.values):
            self.contents[storage].append(ValueId(value))
        self.next_op = 0

    def write(self, made_by: str) -> Schedule:
        problem = self.line.problem
        steps = self.line.steps
        frees: list[list[int]] = [[] for _ in steps]
        for copy in self.line.copies:
            last = steps[copy.end]
            lent = self.line.first[last] == copy.end and copy.item in problem.lends[last]
            replaced = copy.start < copy.end and copy.item in problem.makes[last]
            if not lent and not replaced:
                frees[copy.end].append(copy.item)
        for step, node in enumerate(steps):
            op, value = problem.op[node], problem.value[node]
            if value is not None:
                self._define(value)
            if op is not None:
                is_first = bool(self.line.first[node] == step)
                self._constants_before(op, is_first)
                self._compute(op, is_first)
            if step + 1 < len(steps):  # at the end the program may still hold what is there
                for item in frees[step]:
                    self._free(problem.storage[item])
        self._constants_before(OpId(len(self.trace.ops)), True)
        return Schedule(tuple(self.actions), made_by)

    def _constants_before(self, op: OpId, is_first: bool) -> None:
        """Parameters are no nodes, but the program makes them in their place."""
        while is_first and self.next_op < op:
            self._compute(OpId(self.next_op), True)

    def _compute(self, op_id: OpId, is_first: bool) -> None:
        op = self.trace.ops[op_id]
        for value in op.inputs:
            self._define(value)
        self.actions.append(Compute(op_id, in_place=is_first and bool(op.overwrites)))
        for value in op.outputs:
            self.defined[value] = True
        if is_first:
            self.next_op = op_id + 1
            for _, source in op.overwrites:
                self._forget(self.trace.values[source])

    def _define(self, value: ValueId) -> None:
        """Runs the views again through which `value` is reached, if its storage was recomputed."""
        if self.defined[value]:
            return
        if self.trace.is_root(value):
            raise ValueError(f"value {value} is read while it is gone")
        op_id = self.trace.maker[value]
        if not self.trace.ops[op_id].replayable:
            raise Unsupported(
                f"op {op_id} ({self.trace.ops[op_id].name}) makes a view that cannot be made again;"
                " hold its storage in the trace"
            )
        self._compute(op_id, False)

    def _free(self, storage: StorageId) -> None:
        self.actions.append(Free(storage))
        self._forget(storage)

    def _forget(self, storage: StorageId) -> None:
        for value in self.contents[storage]:
            self.defined[value] = False
