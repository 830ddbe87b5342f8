"""The engine's picture of the program: storages, values in them, and the calls that made them.

A storage knows the calls that read it (`consumers`), a call the values it reads: the graph holds
itself together by strong references in both directions, and `Engine` takes it apart when nobody can
ask for a storage any more. A driver hangs what it needs on `payload`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

from rekindle._types import Bytes, Nanoseconds, OpId, StorageId


@final
class Storage:
    """A piece of memory: the unit of eviction."""

    __slots__ = (
        "consumers",
        "cost",
        "held",
        "id",
        "last_access",
        "locks",
        "makers",
        "nbytes",
        "on_host",
        "order",
        "payload",
        "pinned",
        "references",
        "replayable",
        "resident",
        "returns",
        "values",
    )

    def __init__(self, storage_id: StorageId, nbytes: Bytes) -> None:
        self.id = storage_id
        self.nbytes = nbytes
        self.cost: Nanoseconds = 0  #: of all calls that made it, views included, or of a copy
        self.last_access: Nanoseconds = 0
        self.order = -1  #: when it became a candidate; negative: it is none
        self.locks = 0  #: calls in progress that read it
        self.references = 0  #: references that permit eviction
        self.held = False  #: the program's own variables keep the memory
        self.returns = False  #: let go though they do: it is brought back when the program asks
        self.pinned = False  #: must stay as long as anybody needs it
        self.resident = False
        self.on_host = False  #: a copy is there, from which it can be had without its calls
        self.replayable = True  #: every call that made it can be run again
        self.values: list[Value] = []  #: root first, then views
        self.makers: list[Call] = []  #: of the values, each once; empty once it is out of the graph
        self.consumers: dict[
            Call, None
        ] = {}  #: replayable calls that read it, but those that only view it
        self.payload: Any = None

    def parents(self) -> list[Storage]:
        """What must be resident to compute it again; nothing if there is a copy of it."""
        if self.on_host:
            return []
        return [
            value.storage
            for call in self.makers
            for value in call.inputs
            if value.storage is not self
        ]

    def children(self) -> list[Storage]:
        """What it is a parent of."""
        return [
            child
            for call in self.consumers
            for value in call.outputs
            if (child := value.storage) is not self and child.makers and not child.on_host
        ]

    def made_through(self) -> list[Storage]:
        """What cannot be recomputed without it unless a resident helps; oldest first."""
        found: dict[Storage, None] = {}
        stack: list[Storage] = [self]
        while stack:
            for child in stack.pop().children():
                if child not in found:
                    found[child] = None
                    if not child.resident:
                        stack.append(child)
        return sorted(found, key=lambda made: made.id)

    @property
    def restorable(self) -> bool:
        """It can be had again once it is let go."""
        return self.replayable or self.on_host

    @property
    def recipe_ns(self) -> Nanoseconds:
        """The cost of its calls, whether or not there is a copy of it."""
        return sum(call.cost for call in self.makers)

    @property
    def dead(self) -> bool:
        """Nobody can ask for it any more; it may still be needed to recompute others."""
        return self.references == 0 and not self.held

    @property
    def useless(self) -> bool:
        """A dead source from which only what the program keeps anyway could be computed again."""
        if not self.dead or not self.consumers:
            return False
        found: set[Storage] = {self}
        stack: list[Storage] = [self]
        while stack:
            for child in stack.pop().children():
                if child.dead:
                    if child not in found:
                        found.add(child)
                        stack.append(child)
                elif not (child.resident and child.held):
                    return False
        return True

    def __repr__(self) -> str:
        flags = [
            name
            for name in ("resident", "on_host", "held", "pinned", "replayable")
            if getattr(self, name)
        ]
        return f"<storage {self.id}: {self.nbytes} B, {self.references} refs, {' '.join(flags)}>"


@final
class Value:
    """What one call wrote into a storage."""

    __slots__ = ("call", "defined", "storage")

    def __init__(self, storage: Storage, call: Call) -> None:
        self.storage = storage
        self.call = call
        self.defined = False


@final
class Call:
    """One execution of an operator: what it reads and what it makes."""

    __slots__ = (
        "cost",
        "id",
        "inputs",
        "made",
        "name",
        "nbytes",
        "outputs",
        "overwrites",
        "payload",
        "ran",
        "replayable",
        "workspace",
    )

    def __init__(
        self,
        call_id: OpId,
        name: str,
        cost: Nanoseconds,
        inputs: Sequence[Value],
        replayable: bool = True,
    ) -> None:
        self.id = call_id
        self.name = name
        self.cost = cost
        self.inputs = inputs
        self.outputs: list[Value] = []
        self.made: list[Storage] = []  #: the storages whose root is an output
        self.nbytes: Bytes = 0  #: of those
        self.workspace: Bytes = 0  #: what it takes beside them while it runs, and gives back
        self.overwrites: Sequence[tuple[Value, Value]] = ()  #: (output, input it takes over)
        self.replayable = replayable
        self.ran = False
        self.payload: Any = None

    def makes(self, storage_id: StorageId, nbytes: Bytes) -> Value:
        """Adds an output in a storage of its own."""
        storage = Storage(storage_id, nbytes)
        value = Value(storage, self)
        storage.values.append(value)
        storage.makers.append(self)
        self.made.append(storage)
        self.outputs.append(value)
        self.nbytes += nbytes
        return value

    def views(self, storage: Storage) -> Value:
        """Adds an output that is a view of `storage`."""
        value = Value(storage, self)
        storage.values.append(value)
        if storage.makers[-1] is not self:
            storage.makers.append(self)
        self.outputs.append(value)
        return value

    def consume(self) -> None:
        """Tells the inputs that they are needed to run this again; not for views of themselves."""
        views = len(self.made) < len(self.outputs)
        for value in self.inputs:
            storage = value.storage
            if not views or any(output.storage is not storage for output in self.outputs):
                storage.consumers[self] = None

    def disown(self) -> Iterable[Storage]:
        """This cannot run again. Returns the storages of its outputs, if in the graph."""
        self.replayable = False
        for value in self.inputs:
            value.storage.consumers.pop(self, None)
        return dict.fromkeys(value.storage for value in self.living_outputs())

    def dissolve(self) -> None:
        """Nobody needs it any more: lets go of what refers to it in its turn.

        So memory and records go at once, and do not wait for the garbage collector.
        """
        self.inputs, self.overwrites, self.payload = (), (), None
        self.outputs, self.made = [], []

    def storages(self) -> Iterable[Storage]:
        """Those of the outputs, each once."""
        return dict.fromkeys([value.storage for value in self.outputs])

    def outputs_but_last(self, wanted: Value | None) -> Sequence[Value]:
        """The outputs in the order in which they become candidates: `wanted` (None: the first) is
        the last."""
        if len(self.outputs) < 2:
            return self.outputs
        last = wanted or self.outputs[0]
        return [*(value for value in self.outputs if value is not last), last]

    def living_outputs(self) -> Iterator[Value]:
        """The outputs that are in the graph: somebody may yet ask for them."""
        for value in self.outputs:
            if value.storage.makers:
                yield value

    def __repr__(self) -> str:
        return f"<call {self.id}: {self.name}>"
