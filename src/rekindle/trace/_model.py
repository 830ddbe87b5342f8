"""Define traces: operators over values in storages, and the order of events. All data are frozen.

A **storage** is a piece of memory, the unit of eviction. A **value** is the contents of a storage
after one operator wrote it. The first value of a storage is its root. Further values of the storage
are views (aliases). They take no bytes of their own and are evicted with the storage. An in-place
write makes a *new* storage that takes over the memory of the old one (`Op.overwrites`). So each
value is written only once.
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
        cost: The time of the operator in ns.
        inputs: The values that the operator reads.
        outputs: The values that the operator makes.
        replayable: False if the outputs cannot be recomputed, as for parameters and batches.
        overwrites: Pairs (output, input whose memory the output takes over).
        is_backward: True if the operator belongs to the backward pass.
        workspace: Bytes that the operator uses internally while it runs.
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
    """Event: the program runs `op` for the first time. Operators are called in order of their ids.

    Each output starts with one owner. With `held` the owner is a variable of the program, which
    forbids eviction until `Drop`. Otherwise the owner is a reference that permits eviction.
    """

    op: OpId
    held: bool = False


@final
@dataclass(frozen=True, slots=True)
class Use:
    """Event: the program reads `value` outside any operator, so the value must be resident.

    From this event on, a variable of the program holds the value until `Drop`.
    """

    value: ValueId


@final
@dataclass(frozen=True, slots=True)
class Retain:
    """Event: autograd or another owner begins to hold `value`, which may still be evicted."""

    value: ValueId


@final
@dataclass(frozen=True, slots=True)
class Release:
    """Event: an owner that a `Retain` announced stops holding `value`.

    A storage that has no references and that no variable holds is dead.
    """

    value: ValueId


@final
@dataclass(frozen=True, slots=True)
class Drop:
    """Event: the program's own variables no longer hold the storage of `value`."""

    value: ValueId


@final
@dataclass(frozen=True, slots=True)
class Pin:
    """Event: `value` is pinned, so that it stays resident while it has references.

    Outputs of the program and tensors given to `run.keep` are pinned.
    """

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
        name: A name of the program for the user; it has no effect.
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
        """The time (ns) of running every operator once."""
        return sum(op.cost for op in self.ops)
