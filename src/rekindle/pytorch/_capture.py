"""Writes down what the runtime tells its engine, as a trace that the simulator can replay.

Every storage of the runtime has one value, and operators, storages and values are numbered as they
come: the ids of the engine are those of the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch

from rekindle._types import ValueId
from rekindle.engine import Call, Storage
from rekindle.trace import Trace, TraceBuilder


@final
class Capture:
    """The events of one run so far; `trace()` makes them a `Trace`."""

    def __init__(self) -> None:
        self._builder = TraceBuilder("captured", held=True)
        #: Asked at every operator of the forward pass: which module it belongs to.
        self.where: Callable[[], str] | None = None
        self.modules: list[str] = []  #: for each operator, what `where` said
        self._handed_over: list[tuple[ValueId, ValueId, int]] = []

    def called(self, call: Call) -> None:
        inputs = [_value(value.storage) for value in call.inputs]
        overwritten = {output.storage: source.storage for output, source in call.overwrites}
        overwrites = [
            (position, _value(overwritten[made]))
            for position, made in enumerate(call.made)
            if made in overwritten
        ]
        inputs += [value for _, value in overwrites if value not in inputs]
        backward = torch._C._current_graph_task_id() >= 0
        self.modules.append("" if backward or self.where is None else self.where())
        self._builder.call(
            call.name,
            call.cost,
            inputs,
            [made.nbytes for made in call.made],
            overwrites=overwrites,
            replayable=call.replayable,
            is_backward=backward,
        )
        for made in call.made:
            if made.pinned:
                self._builder.pin(_value(made))
        for old, new, references in self._handed_over:
            for _ in range(references):
                self._builder.retain(new)
                self._builder.release(old)
        self._handed_over.clear()

    def handed_over(self, old: Storage, new: Storage) -> None:
        """Whoever refers to `old` means `new`, which the next call makes."""
        self._handed_over.append((_value(old), _value(new), old.references))

    def retained(self, storage: Storage) -> None:
        self._builder.retain(_value(storage))

    def released(self, storage: Storage) -> None:
        self._builder.release(_value(storage))

    def used(self, storage: Storage) -> None:
        self._builder.use(_value(storage))

    def dropped(self, storage: Storage) -> None:
        self._builder.drop(_value(storage))

    def pinned(self, storage: Storage) -> None:
        self._builder.pin(_value(storage))

    def sealed(self, storage: Storage) -> None:
        self._builder.seal(_value(storage))

    def trace(self) -> Trace:
        return self._builder.build()


def _value(storage: Storage) -> ValueId:
    return ValueId(storage.id)
