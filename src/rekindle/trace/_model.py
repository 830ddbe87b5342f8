"""Define traces: operators over values in storages, and the order of events. All data are frozen.

A **storage** is a piece of memory, the unit of eviction. A **value** is the contents of a storage
after one operator wrote it. The first value of a storage is its root. Further values are views
(aliases); they cost no bytes, but are evicted with the storage. An in-place write makes a *new*
storage that takes over the memory of the old one (`Op.overwrites`), so each value is written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import final

from rekindle._types import Bytes, Nanoseconds, OpId, StorageId, ValueId


@final
@dataclass(frozen=True, slots=True)
class Op:
    """One execution of an operator. Ids are positions in the tuples of the trace.

    Attributes:
        name: The name of the operator.
        cost: Its cost in ns.
        inputs: The values that it reads.
        outputs: The values that it makes.
        replayable: False if the outputs cannot be recomputed, as for parameters and batches.
        overwrites: Pairs (output, input whose memory it takes over).
        is_backward: True if it belongs to the backward pass.
        workspace: Bytes that it uses internally.
    """

    name: str
    cost: Nanoseconds
    inputs: tuple[ValueId, ...]
    outputs: tuple[ValueId, ...]
    replayable: bool = True
    overwrites: tuple[tuple[ValueId, ValueId], ...] = ()
    is_backward: bool = False
    workspace: Bytes = 0


@final
@dataclass(frozen=True, slots=True)
class Call:
    """The program runs `op` for the first time; operators are called in the order of their ids.

    Each output starts with one owner. With `held` the owner is a variable of the program, which
    forbids eviction until `Drop`. Otherwise it is a reference that permits eviction.
    """

    op: OpId
    held: bool = False


@final
@dataclass(frozen=True, slots=True)
class Use:
    """The program reads `value` outside any operator; the value is resident and user-held then."""

    value: ValueId


@final
@dataclass(frozen=True, slots=True)
class Retain:
    """A reference to `value` that permits eviction begins (a handle of autograd, a copy)."""

    value: ValueId


@final
@dataclass(frozen=True, slots=True)
class Release:
    """One reference to `value` ends. A storage without references and holds is dead."""

    value: ValueId


@final
@dataclass(frozen=True, slots=True)
class Drop:
    """The program's own variables no longer hold the storage of `value`."""

    value: ValueId


@final
@dataclass(frozen=True, slots=True)
class Pin:
    """`value` is pinned: resident from now on while it has references (an output, `run.keep`)."""

    value: ValueId


Event = Call | Use | Retain | Release | Drop | Pin


@final
@dataclass(frozen=True)
class Trace:
    """Trace of a program: operators over values in storages, and the order of events.

    Attributes:
        storages: The size (bytes) of each storage.
        values: The storage of each value.
        ops: Every execution of an operator.
        events: All events, in order.
        name: A name for people.
    """

    storages: tuple[Bytes, ...]
    values: tuple[StorageId, ...]
    ops: tuple[Op, ...]
    events: tuple[Event, ...]
    name: str = ""

    @cached_property
    def maker(self) -> tuple[OpId, ...]:
        """The operator that made each value."""
        makers = [OpId(-1)] * len(self.values)
        for op_id, op in enumerate(self.ops):
            for value in op.outputs:
                makers[value] = OpId(op_id)
        return tuple(makers)

    @cached_property
    def root(self) -> tuple[ValueId, ...]:
        """The first value of each storage."""
        roots = [ValueId(-1)] * len(self.storages)
        for value, storage in enumerate(self.values):
            if roots[storage] < 0:
                roots[storage] = ValueId(value)
        return tuple(roots)

    def is_root(self, value: ValueId) -> bool:
        """Return True if `value` is the first value of its storage."""
        return self.root[self.values[value]] == value

    def new_storages(self, op: Op) -> Iterator[StorageId]:
        """Yield the storages that `op` makes."""
        for value in op.outputs:
            if self.is_root(value):
                yield self.values[value]

    def output_bytes(self, op: Op) -> Bytes:
        """Return the bytes of all storages that `op` makes."""
        return sum(self.storages[storage] for storage in self.new_storages(op))

    @cached_property
    def compute_ns(self) -> Nanoseconds:
        """The cost (ns) of running every operator once."""
        return sum(op.cost for op in self.ops)
