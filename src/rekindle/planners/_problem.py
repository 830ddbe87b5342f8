"""Define the problem of a planner: operators in order, and the storages that they read and make.

A **node** is an operator call of the program, or a moment at which the program itself reads a
value. An **item** is a storage, or the workspace of an operator. Nodes read and make items. A plan
runs every node once, in the order of the trace, and may run operators again in between. Parameters
and other sources that stay in memory all the time are not items; their sizes add up to `fixed`.

A workspace is read by no node, and exists only while its own node runs. Views cost no memory and
are not items: a node that reads a view reads the item of the view's storage. `_writer.to_schedule`
adds the operators that make views again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import final

from rekindle._types import Bytes, Nanoseconds, OpId, StorageId, ValueId
from rekindle.trace import Call, Drop, Pin, Release, Retain, Trace, Use, check_trace, keep_all_peak


@final
@dataclass(frozen=True, slots=True)
class Hold:
    """Interval in which `item` (a storage) cannot be evicted, because it is pinned or user-held.

    The interval begins with the first run of node `first` and ends with the first run of node
    `last`.
    """

    item: int
    first: int
    last: int


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """Problem of a planner: nodes with costs, and items with bytes, made from a trace.

    A node is an operator call, or a moment at which the program reads a value. An item is a storage
    or the workspace of an operator. Nodes and items are numbered from 0.
    """

    trace: Trace
    cost: tuple[Nanoseconds, ...]
    """The cost (ns) of each node."""
    reads: tuple[tuple[int, ...], ...]
    """The items that each node reads."""
    makes: tuple[tuple[int, ...], ...]
    """The items that each node makes."""
    overwrites: tuple[tuple[int, ...], ...]
    """The items that the first run of each node overwrites in place, taking over their memory."""
    replayable: tuple[bool, ...]
    """For each node, True if the node can run again."""
    op: tuple[OpId | None, ...]
    """The operator of each node; None for a moment at which the program itself reads a value."""
    value: tuple[ValueId | None, ...]
    """For each node, the value that the program itself reads; None if the node is an operator."""
    nbytes: tuple[Bytes, ...]
    """The bytes of each item."""
    maker: tuple[int, ...]
    """The node that makes each item."""
    storage: tuple[StorageId | None, ...]
    """The storage of each item; None for a workspace, which is not part of schedules."""
    holds: tuple[Hold, ...]
    """Intervals in which items cannot be evicted, because they are pinned or user-held."""
    fixed: Bytes
    """Bytes of parameters and other storages without a recipe that stay from beginning to end."""

    @staticmethod
    def of(trace: Trace) -> Problem:
        """Make the problem of a planner from a trace.

        Args:
            trace: The recorded program: operators, storages and events.

        Raises:
            InvalidTrace: The trace breaks a rule.
        """
        return _Distiller(check_trace(trace)).distil()

    def __len__(self) -> int:
        return len(self.cost)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each storage, the nodes that read it, in order."""
        found: list[list[int]] = [[] for _ in self.nbytes]
        for node, items in enumerate(self.reads):
            for item in items:
                found[item].append(node)
        return tuple(tuple(nodes) for nodes in found)

    @cached_property
    def keep_all_peak(self) -> Bytes:
        """The most bytes in use at once if nothing is evicted."""
        return keep_all_peak(self.trace)

    @cached_property
    def compute_ns(self) -> Nanoseconds:
        """The cost (ns) of running every node once."""
        return sum(self.cost)

    @cached_property
    def grain(self) -> Nanoseconds:
        """The greatest common divisor of all costs (ns)."""
        return gcd(*self.cost) or 1

    @cached_property
    def floor(self) -> Bytes:
        """A budget (bytes) below which no schedule exists.

        It is the largest need of a single node: the storages that the node reads and makes, its
        workspace, the storages that are pinned or user-held while it runs, and `fixed`.
        """
        held = self.held_bytes
        need = 0
        for node in range(len(self)):
            own = {*self.reads[node], *self.makes[node]} - {*self.overwrites[node]}
            counted = own.union(self.overwrites[node])
            others = held[node] - sum(self.nbytes[i] for i in counted if self._held_at(i, node))
            need = max(need, others + sum(self.nbytes[item] for item in own))
        return need + self.fixed

    @cached_property
    def held_bytes(self) -> tuple[Bytes, ...]:
        """Bytes of the storages that are pinned or user-held while each node first runs."""
        change = [0] * (len(self) + 1)
        for hold in self.holds:
            change[hold.first + 1] += self.nbytes[hold.item]
            change[min(hold.last + 1, len(self))] -= self.nbytes[hold.item]
        total, result = 0, list[int]()
        for step in change[:-1]:
            total += step
            result.append(total)
        return tuple(result)

    def _held_at(self, item: int, node: int) -> bool:
        return any(hold.first < node <= hold.last for hold in self.holds_of.get(item, ()))

    @cached_property
    def holds_of(self) -> dict[int, list[Hold]]:
        """For each pinned or user-held storage, the intervals in which it cannot be evicted."""
        found: dict[int, list[Hold]] = {}
        for hold in self.holds:
            found.setdefault(hold.item, []).append(hold)
        return found


class _Distiller:
    """Converter of a trace to a problem, in one pass over the events."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.constants = _constants(trace)
        self.sources = _sources_of_views(trace)
        self.item: dict[int, int] = {}
        self.cost: list[Nanoseconds] = []
        self.reads: list[tuple[int, ...]] = []
        self.makes: list[tuple[int, ...]] = []
        self.overwrites: list[tuple[int, ...]] = []
        self.replayable: list[bool] = []
        self.op: list[OpId | None] = []
        self.value: list[ValueId | None] = []
        self.maker: list[int] = []
        self.nbytes: list[Bytes] = []
        self.storage: list[StorageId | None] = []
        self.holds: list[Hold] = []
        self.references = [0] * len(trace.storages)
        self.held_since: dict[int, int] = {}
        self.pinned: set[int] = set()
        # storages that are pinned and still referenced -> first node of the interval
        self.pinned_since: dict[int, int] = {}

    def distil(self) -> Problem:
        """Process all events of the trace and return the problem."""
        for event in self.trace.events:
            match event:
                case Call(op_id, held):
                    self._call(op_id, held)
                case Use(value):
                    self._moment(value)
                    self.held_since.setdefault(self.trace.values[value], len(self.cost) - 1)
                case Pin(value):
                    self._moment(value)
                    self.pinned.add(self.trace.values[value])
                    self._pin(self.trace.values[value])
                case Retain(value):
                    self.references[self.trace.values[value]] += 1
                    self._pin(self.trace.values[value])
                case Release(value):
                    self._release(self.trace.values[value])
                case Drop(value):
                    self._end(self.held_since, self.trace.values[value])
        for since in (self.held_since, self.pinned_since):
            for storage in list(since):  # Pinned or user-held until the end of the program.
                self._end(since, storage)
        return Problem(
            self.trace,
            tuple(self.cost),
            tuple(self.reads),
            tuple(self.makes),
            tuple(self.overwrites),
            self._repeatable(),
            tuple(self.op),
            tuple(self.value),
            tuple(self.nbytes),
            tuple(self.maker),
            tuple(self.storage),
            tuple(self.holds),
            sum(self.trace.storages[storage] for storage in self.constants),
        )

    def _repeatable(self) -> tuple[bool, ...]:
        """Return for each node whether the node can run again.

        A node can run again if its operator can. The exception is a node that reads a storage that
        is later overwritten in place, if the node that makes this storage cannot run again.
        """
        overwritten = {item for items in self.overwrites for item in items}
        lost: set[int] = set()
        found: list[bool] = []
        for node, replayable in enumerate(self.replayable):
            found.append(replayable and lost.isdisjoint(self.reads[node]))
            if not found[-1]:
                lost.update(overwritten.intersection(self.makes[node]))
        return tuple(found)

    def _call(self, op_id: OpId, held: bool) -> None:
        """Add the node of an operator and its storages, unless it only makes parameters."""
        op = self.trace.ops[op_id]
        storages = {self.trace.values[value] for value in op.outputs}
        if not storages or not storages <= self.constants:
            makes = [
                self._item(storage, self.trace.storages[storage])
                for storage in self.trace.new_storages(op)
            ]
            if op.workspace:
                makes.append(self._item(None, op.workspace))
            overwrites = self._items(self.trace.values[source] for _, source in op.overwrites)
            self._node(
                op_id, None, op.cost, self._read(op.inputs), makes, overwrites, op.replayable
            )
        for value in op.outputs:
            storage = self.trace.values[value]
            if held:
                self.held_since.setdefault(storage, len(self.cost) - 1)
            else:
                self.references[storage] += 1
        for _, source in op.overwrites:
            self.pinned.discard(self.trace.values[source])
            for since in (self.held_since, self.pinned_since):
                self._end(since, self.trace.values[source])

    def _moment(self, value: ValueId) -> None:
        """Add a node without an operator, at which the program itself reads `value`."""
        self._node(None, value, 0, self._read([value]), (), (), True)

    def _node(
        self,
        op: OpId | None,
        value: ValueId | None,
        cost: Nanoseconds,
        reads: tuple[int, ...],
        makes: Sequence[int],
        overwrites: tuple[int, ...],
        replayable: bool,
    ) -> None:
        self.op.append(op)
        self.value.append(value)
        self.cost.append(cost)
        self.reads.append(reads)
        self.makes.append(tuple(makes))
        self.overwrites.append(overwrites)
        self.replayable.append(replayable)

    def _item(self, storage: StorageId | None, nbytes: Bytes) -> int:
        """Add a storage or workspace that the next node makes, and return its number."""
        made = len(self.storage)
        if storage is not None:
            self.item[storage] = made
        self.storage.append(storage)
        self.nbytes.append(nbytes)
        self.maker.append(len(self.cost))
        return made

    def _read(self, values: Iterable[ValueId]) -> tuple[int, ...]:
        return self._items(storage for value in values for storage in self.sources[value])

    def _items(self, storages: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.item[s] for s in storages if s not in self.constants))

    def _pin(self, storage: StorageId) -> None:
        if storage in self.pinned and self.references[storage]:
            self.pinned_since.setdefault(storage, len(self.cost) - 1)

    def _release(self, storage: StorageId) -> None:
        self.references[storage] -= 1
        if self.references[storage] <= 0:
            self._end(self.pinned_since, storage)

    def _end(self, since: dict[int, int], storage: int) -> None:
        """Add the interval in which `storage` was pinned or user-held, if `since` has its begin."""
        first = since.pop(storage, None)
        last = len(self.cost) - 1
        if first is not None and storage in self.item and first < last:
            self.holds.append(Hold(self.item[storage], first, last))


def _constants(trace: Trace) -> set[int]:
    """Return the storages that exist before the first operator and stay user-held to the end.

    These are mostly parameters and buffers of the model.
    """
    found: set[int] = set()
    begun = False
    for event in trace.events:
        if isinstance(event, Call):
            op = trace.ops[event.op]
            begun = begun or op.replayable or bool(op.inputs)
            if not begun and event.held:
                found.update(trace.new_storages(op))
            found -= {trace.values[source] for _, source in op.overwrites}
        elif isinstance(event, Drop):
            found.discard(trace.values[event.value])
    return found


def _sources_of_views(trace: Trace) -> list[tuple[StorageId, ...]]:
    """Return for each value the storages that must be in memory to read the value.

    These are the storage of the value and, for a view, the storages from which the view is made.
    """
    found: list[tuple[StorageId, ...]] = [()] * len(trace.values)
    for op in trace.ops:
        for value in op.outputs:
            found[value] = (trace.values[value],)
            if not trace.is_root(value):
                siblings = (storage for source in op.inputs for storage in found[source])
                found[value] = tuple(dict.fromkeys((*found[value], *siblings)))
    return found
