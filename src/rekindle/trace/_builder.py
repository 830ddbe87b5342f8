"""Append-only construction of a trace: for captures, readers of files, and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from rekindle._types import Bytes, Nanoseconds, OpId, StorageId, ValueId
from rekindle.trace._model import Call, Drop, Event, Op, Pin, Release, Retain, Trace, Use
from rekindle.trace._rules import check_trace


@final
class TraceBuilder:
    """Builds a `Trace` call by call. `build()` checks the rules and returns it.

    >>> builder = TraceBuilder()
    >>> x = builder.source(100)
    >>> (y,) = builder.call("relu", 5, [x], [100])
    >>> builder.release(y)
    >>> builder.build().compute_ns
    5
    """

    def __init__(self, name: str = "", *, held: bool = False) -> None:
        self.name = name
        self._held = held
        self._storages: list[Bytes] = []
        self._values: list[StorageId] = []
        self._ops: list[Op] = []
        self._events: list[Event] = []

    @property
    def operators(self) -> int:
        """How many were called so far."""
        return len(self._ops)

    @property
    def storages(self) -> int:
        """How many were made so far."""
        return len(self._storages)

    def bytes_of(self, value: ValueId) -> Bytes:
        """The size of the storage in which `value` is."""
        return self._storages[self._values[value]]

    def source(self, nbytes: Bytes, name: str = "source", *, held: bool | None = None) -> ValueId:
        """A storage that nothing can recompute: a parameter, a batch."""
        return self.call(name, 0, (), (nbytes,), replayable=False, held=held)[0]

    def call(
        self,
        name: str,
        cost: Nanoseconds,
        inputs: Sequence[ValueId],
        sizes: Sequence[Bytes],
        *,
        aliases: Sequence[ValueId | None] = (),
        overwrites: Sequence[tuple[int, ValueId]] = (),
        replayable: bool = True,
        held: bool | None = None,
        is_backward: bool = False,
        workspace: Bytes = 0,
    ) -> tuple[ValueId, ...]:
        """One operator; returns its outputs, one for each of `sizes`.

        `aliases[i]` makes output i a view of that value's storage (its size is then ignored);
        `overwrites` lists (position of the output, input whose memory it takes over).
        """
        outputs: list[ValueId] = []
        for position, nbytes in enumerate(sizes):
            base = aliases[position] if position < len(aliases) else None
            if base is None:
                self._storages.append(nbytes)
                self._values.append(StorageId(len(self._storages) - 1))
            else:
                self._values.append(self._values[base])
            outputs.append(ValueId(len(self._values) - 1))
        pairs = tuple((outputs[position], value) for position, value in overwrites)
        reads, makes = tuple(inputs), tuple(outputs)
        self._ops.append(Op(name, cost, reads, makes, replayable, pairs, is_backward, workspace))
        hold = self._held if held is None else held
        self._events.append(Call(OpId(len(self._ops) - 1), hold))
        return tuple(outputs)

    def use(self, value: ValueId) -> None:
        self._events.append(Use(value))

    def retain(self, value: ValueId) -> None:
        self._events.append(Retain(value))

    def release(self, value: ValueId) -> None:
        self._events.append(Release(value))

    def drop(self, value: ValueId) -> None:
        self._events.append(Drop(value))

    def pin(self, value: ValueId) -> None:
        self._events.append(Pin(value))

    def seal(self, value: ValueId) -> None:
        """After all, nobody knows how `value` was made: its operator cannot be run again."""
        for number, op in enumerate(self._ops):
            if value in op.outputs:
                self._ops[number] = replace(op, replayable=False)

    def build(self) -> Trace:
        """The trace so far; raises `InvalidTrace` if it breaks a rule."""
        return check_trace(
            Trace(
                tuple(self._storages),
                tuple(self._values),
                tuple(self._ops),
                tuple(self._events),
                self.name,
            )
        )
