"""The engine's graph of the program: storages, the values in them, and the calls that made them.

A storage refers to the calls that read it (`consumers`), and a call to the values that it reads.
These strong references in both directions keep the graph alive. `Engine` removes a storage from the
graph when neither the program nor a recomputation needs it. Drivers attach their own data as
`payload`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, final

from rekindle._types import Bytes, Nanoseconds, OpId, StorageId

# `Storage.feeds_evicted` looks at no more children than this. Nearly all searches end at the first
# ones.
_MOST_CHILDREN: Final = 1_000


@final
class Storage:
    """A piece of memory of the program (a tensor's storage): the unit of eviction.

    The engine distinguishes these states:

    - resident: the storage is in memory.
    - evicted: it is not in memory, but can be recomputed, or swapped in from the host.
    - source: it has no recipe (`replayable` is False), so it is never evicted without a copy.
    - dead: the program cannot reach it any more. Recomputing others may still need it.
    - candidate: it is resident and can be brought back, and nothing needs it now. The policy
      chooses the next victim among the candidates.
    """

    __slots__ = (
        "absent",
        "consumers",
        "cost",
        "evictable_while_held",
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
        "uses",
        "values",
    )

    def __init__(self, storage_id: StorageId, nbytes: Bytes) -> None:
        self.id = storage_id
        self.nbytes = nbytes
        #: Cost (ns) to restore this storage: of all calls that made its values (views included), or
        #: of a transfer from the host.
        self.cost: Nanoseconds = 0
        self.last_access: Nanoseconds = 0
        #: rank by age among the candidates for eviction; negative: the storage is no candidate
        self.order = -1
        #: number of calls in progress that read the storage; it stays in memory meanwhile
        self.locks = 0
        self.references = 0  #: number of the program's references that permit eviction
        self.held = False  #: True if variables of the program hold this storage (user-held)
        #: True if the storage may be evicted while variables hold it. The driver then brings it
        #: back when something reads it.
        self.evictable_while_held = False
        self.pinned = False  #: True if the storage is never evicted
        self.resident = False
        #: True if the host has a copy of the storage, which can be swapped in
        self.on_host = False
        #: True if the program has freed this storage, which has no recipe, but may fill it with the
        #: same contents again (FSDP does). Until then no value that needs it can be recomputed.
        self.absent = False
        self.replayable = True  #: True if all calls that made the storage can run again
        #: the values in this storage: first the whole contents, then the views
        self.values: list[Value] = []
        #: Calls that made the values of this storage, each once. Empty if the storage is not in the
        #: graph.
        self.makers: list[Call] = []
        self.consumers: dict[
            Call, None
        ] = {}  #: recomputable calls that read the storage, except those that only make views of it
        self.payload: Any = None
        #: when the program uses this source, which may be moved to the host; None: not known
        self.uses: Any = None

    def parents(self) -> list[Storage]:
        """Return the storages that recomputing this one reads.

        The list is empty if this storage has a copy on the host, because then it is swapped in.
        """
        if self.on_host:
            return []
        return [
            value.storage
            for call in self.makers
            for value in call.inputs
            if value.storage is not self
        ]

    def children(self) -> list[Storage]:
        """Return the storages whose recomputation reads this one."""
        return [
            child
            for call in self.consumers
            for value in call.outputs
            if (child := value.storage) is not self and child.makers and not child.on_host
        ]

    @property
    def feeds_evicted(self) -> bool:
        """True if an evicted value that the program can reach is recomputed from this storage.

        The search passes through evicted dead storages. After `_MOST_CHILDREN` children the result
        is False.
        """
        looked_at = 0
        found: set[Storage] = {self}
        stack: list[Storage] = [self]
        while stack:
            for child in stack.pop().children():
                looked_at += 1
                if looked_at > _MOST_CHILDREN:
                    return False
                if child.resident or child in found:
                    continue
                if not child.dead:
                    return True
                found.add(child)
                stack.append(child)
        return False

    def made_through(self) -> list[Storage]:
        """Return the storages whose recomputation needs this one, oldest first.

        The search passes through evicted storages and ends at resident ones.
        """
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
        """True if the storage can be recomputed or swapped in after an eviction."""
        return self.replayable or self.on_host

    @property
    def recipe_ns(self) -> Nanoseconds:
        """Cost (ns) to run all calls that made this storage, even if it has a copy on the host."""
        return sum(call.cost for call in self.makers)

    @property
    def dead(self) -> bool:
        """True if the program cannot reach this storage; recomputations may still read it."""
        return self.references == 0 and not self.held

    @property
    def useless(self) -> bool:
        """True if this source serves only to recompute values that are resident and user-held.

        The program cannot reach the source itself. User-held values are not evicted, so no
        recomputation reads the source.
        """
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
    """Contents of a storage (or of a view of it), as one call wrote them."""

    __slots__ = ("call", "defined", "storage")

    def __init__(self, storage: Storage, call: Call) -> None:
        self.storage = storage
        self.call = call
        self.defined = False


@final
class Call:
    """One execution of an operator: the values it reads and the values it makes."""

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
        #: new storages among those of the outputs; a view makes none
        self.made: list[Storage] = []
        self.nbytes: Bytes = 0  #: total bytes of the storages in `made`
        #: bytes that the call needs while it runs, in addition to its new storages
        self.workspace: Bytes = 0
        #: For a call in place: pairs of an output and the input whose storage it takes over.
        self.overwrites: Sequence[tuple[Value, Value]] = ()
        self.replayable = replayable
        self.ran = False
        self.payload: Any = None

    def makes(self, storage_id: StorageId, nbytes: Bytes) -> Value:
        """Add an output to this call, in a new storage of `nbytes`."""
        storage = Storage(storage_id, nbytes)
        value = Value(storage, self)
        storage.values.append(value)
        storage.makers.append(self)
        self.made.append(storage)
        self.outputs.append(value)
        self.nbytes += nbytes
        return value

    def views(self, storage: Storage) -> Value:
        """Add an output to this call that is a view of `storage`."""
        value = Value(storage, self)
        storage.values.append(value)
        if storage.makers[-1] is not self:
            storage.makers.append(self)
        self.outputs.append(value)
        return value

    def consume(self) -> None:
        """Register this call as a consumer of its inputs.

        A call that makes a view of an input is no consumer of that input.
        """
        views = len(self.made) < len(self.outputs)
        for value in self.inputs:
            storage = value.storage
            if not views or any(output.storage is not storage for output in self.outputs):
                storage.consumers[self] = None

    def disown(self) -> Iterable[Storage]:
        """Make this call unrecomputable, and remove it from the consumers of its inputs.

        Returns:
            The storages of its outputs that are in the graph.
        """
        self.replayable = False
        for value in self.inputs:
            value.storage.consumers.pop(self, None)
        return dict.fromkeys(value.storage for value in self.living_outputs())

    def dissolve(self) -> None:
        """Drop all references of this call, because nothing needs it any more.

        This breaks the reference cycles of the graph, so memory is freed at once instead of at the
        next garbage collection.
        """
        self.inputs, self.overwrites, self.payload = (), (), None
        self.outputs, self.made = [], []

    def storages(self) -> Iterable[Storage]:
        """Return the distinct storages of the outputs."""
        return dict.fromkeys([value.storage for value in self.outputs])

    def outputs_but_last(self, wanted: Value | None) -> Sequence[Value]:
        """Return the outputs in the order in which they become candidates for eviction.

        Args:
            wanted: The output that comes last. None: the first output comes last.
        """
        if len(self.outputs) < 2:
            return self.outputs
        last = wanted or self.outputs[0]
        return [*(value for value in self.outputs if value is not last), last]

    def living_outputs(self) -> Iterator[Value]:
        """Iterate over the outputs whose storage is still in the graph."""
        for value in self.outputs:
            if value.storage.makers:
                yield value

    def __repr__(self) -> str:
        return f"<call {self.id}: {self.name}>"
