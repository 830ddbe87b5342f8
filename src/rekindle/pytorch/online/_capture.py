"""Writes down what the runtime tells its engine, as a trace that the simulator can replay.

Every storage of the runtime has one value, and operators, storages and values are numbered as they
come: the ids of the engine are those of the trace. A capture that begins amid a run takes what is
there as sources, and counts from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch

from rekindle._types import ValueId
from rekindle.engine import Call, Storage
from rekindle.trace import Trace, TraceBuilder


@final
class Capture:
    """The events of a run, or of a part of it, so far; `trace()` makes them a `Trace`."""

    def __init__(
        self,
        present: Iterable[Storage] = (),
        counted: Iterable[tuple[int, int]] = (),
        next_storage: int = 0,
    ) -> None:
        """`present`: what is in the graph or in memory already; `counted`: what is in memory but
        in no graph, as (key, bytes); `next_storage`: the next id."""
        self._builder = TraceBuilder("captured", held=True)
        self._handed_over: list[tuple[ValueId, ValueId, int]] = []
        self._present: dict[int, ValueId] = {}
        for storage in present:
            value = self._builder.source(storage.nbytes, held=storage.held)
            self._present[storage.id] = value
            for _ in range(storage.references - (not storage.held)):
                self._builder.retain(value)
            if storage.dead:
                self._builder.release(value)
        self._counted = {key: self._builder.source(nbytes) for key, nbytes in counted}
        #: What the ids of the engine's storages have more than those of the trace.
        self._base = next_storage - self._builder.storages

    @property
    def operators(self) -> int:
        """How many the trace has so far, sources included."""
        return self._builder.operators

    @property
    def storages(self) -> int:
        """How many the trace has so far."""
        return self._builder.storages

    def called(self, call: Call) -> None:
        _value = self._value
        inputs = [_value(value.storage) for value in call.inputs]
        overwritten = {output.storage: source.storage for output, source in call.overwrites}
        overwrites = [
            (position, _value(overwritten[made]))
            for position, made in enumerate(call.made)
            if made in overwritten
        ]
        inputs += [value for _, value in overwrites if value not in inputs]
        self._builder.call(
            call.name,
            call.cost,
            inputs,
            [made.nbytes for made in call.made],
            overwrites=overwrites,
            replayable=call.replayable,
            is_backward=torch._C._current_graph_task_id() >= 0,
            workspace=call.workspace,
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
        self._handed_over.append((self._value(old), self._value(new), old.references))

    def retained(self, storage: Storage) -> None:
        self._builder.retain(self._value(storage))

    def released(self, storage: Storage) -> None:
        self._builder.release(self._value(storage))

    def used(self, storage: Storage) -> None:
        self._builder.use(self._value(storage))

    def dropped(self, storage: Storage) -> None:
        self._builder.drop(self._value(storage))

    def uncounted(self, key: int) -> None:
        """What was in no graph is gone, or is in the graph now."""
        value = self._counted.pop(key, None)
        if value is not None:
            self._builder.drop(value)

    def pinned(self, storage: Storage) -> None:
        self._builder.pin(self._value(storage))

    def sealed(self, storage: Storage) -> None:
        self._builder.seal(self._value(storage))

    def trace(self) -> Trace:
        return self._builder.build()

    def _value(self, storage: Storage) -> ValueId:
        found = self._present.get(storage.id)
        return ValueId(storage.id - self._base) if found is None else found


@final
class Captures:
    """Several captures of one run: each method tells all of them."""

    def __init__(self, *captures: Capture) -> None:
        self._captures = captures

    def __getattr__(self, name: str) -> Any:
        methods = [getattr(capture, name) for capture in self._captures]

        def tell(*what: Call | Storage | int) -> None:
            for method in methods:
                method(*what)

        return tell
