"""Build a trace event by event. Captures, readers of trace files and tests use this module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from rekindle._types import Bytes, Nanoseconds, OpId, StorageId, ValueId
from rekindle.trace._model import Call, Drop, Event, Op, Pin, Release, Retain, Trace, Use
from rekindle.trace._rules import check_trace


@final
class TraceBuilder:
    """Builder of a `Trace`, call by call; `build()` checks the rules of a valid trace.

    Args:
        name: The name of the trace.
        held: True if a variable of the program holds each result until `drop` is called.

    Example:
        ```python
        builder = TraceBuilder()
        x = builder.source(100)
        (y,) = builder.call("relu", 5, [x], [100])
        builder.release(y)
        assert builder.build().compute_ns == 5
        ```
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
        """The number of operators added so far."""
        return len(self._ops)

    @property
    def storages(self) -> int:
        """The number of storages added so far."""
        return len(self._storages)

    def bytes_of(self, value: ValueId) -> Bytes:
        """Return the size (bytes) of the storage of `value`."""
        return self._storages[self._values[value]]

    def source(self, nbytes: Bytes, name: str = "source", *, held: bool | None = None) -> ValueId:
        """Add a storage that nothing can recompute, such as a parameter or a batch.

        Args:
            nbytes: The size of the storage.
            name: The name of the storage.
            held: True if a variable holds the storage until `drop`. Default: `held` of the builder.

        Returns:
            The value in the storage.
        """
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
        """Add a call of an operator.

        Args:
            name: The name of the operator.
            cost: The time of the operator in ns.
            inputs: The values that the operator reads.
            sizes: The size (bytes) of each output.
            aliases: For each output that is a view, a value of the storage that it is a view of;
                None for other outputs. The size of a view is ignored.
            overwrites: Pairs (position of the output, input whose memory the output takes over).
            replayable: False if the operator cannot run again.
            held: True if variables hold the outputs until `drop`. Default: `held` of the builder.
            is_backward: True if the operator belongs to the backward pass.
            workspace: Bytes that the operator uses internally while it runs.

        Returns:
            The values of the outputs.
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
        """Add an event: the program reads `value` outside any operator."""
        self._events.append(Use(value))

    def retain(self, value: ValueId) -> None:
        """Add an event: a reference to `value` begins. The value may still be evicted."""
        self._events.append(Retain(value))

    def release(self, value: ValueId) -> None:
        """Add an event: one reference to `value` ends."""
        self._events.append(Release(value))

    def drop(self, value: ValueId) -> None:
        """Add an event: variables of the program no longer hold `value`."""
        self._events.append(Drop(value))

    def pin(self, value: ValueId) -> None:
        """Add an event: `value` is pinned, so it stays in memory while it has references."""
        self._events.append(Pin(value))

    def seal(self, value: ValueId) -> None:
        """Mark the operator that made `value` as one that cannot run again."""
        for number, op in enumerate(self._ops):
            if value in op.outputs:
                self._ops[number] = replace(op, replayable=False)

    def build(self) -> Trace:
        """Return the trace.

        Raises:
            InvalidTrace: The trace breaks a rule.
        """
        return check_trace(
            Trace(
                tuple(self._storages),
                tuple(self._values),
                tuple(self._ops),
                tuple(self._events),
                self.name,
            )
        )
