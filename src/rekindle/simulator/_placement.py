"""Give the storages of a simulated run addresses on a device, and evict more if that fails.

A budget counts bytes, but an allocator needs contiguous bytes. As on a real device, the engine
first evicts storages by the policy until the sum of bytes fits the budget. If an allocation still
fails, more storages are evicted, in one of two ways:

- "window": the cheapest window of neighbors in memory (Coop, NeurIPS 2023), by the policy's score
  without the size. If evicting whole segments or pages, and returning them to the device, costs
  less, these are evicted instead.
- "score": storages one after another, the lowest score first. With the allocator "pages", which
  needs no contiguous memory, this is the only way.

The models of the allocators are in `rekindle.simulator.allocator`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, cast, final

from rekindle._types import Bytes, StorageId
from rekindle.engine import Call, Engine, NoRoom, Storage
from rekindle.schedule import Action, Compute, Discard, Free, SwapIn, SwapOut
from rekindle.simulator.allocator import (
    Block,
    CachingAllocator,
    Expandable,
    Native,
    Pages,
)
from rekindle.trace import Trace

AllocatorName = Literal["native", "expandable", "pages"]
Repair = Literal["window", "score"]

_NOBODY: Final = StorageId(-1)
_ALLOCATORS: Final = {"native": Native, "expandable": Expandable, "pages": Pages}


@final
@dataclass(frozen=True, slots=True)
class Device:
    """Settings of a simulated device.

    Attributes:
        allocator: The model of the allocator.
        memory: The bytes of the device. None: no limit.
        repair: How to select storages to evict if enough bytes are free but not contiguous: the
            cheapest "window" of neighbors, or those with the lowest "score", one after another.
    """

    allocator: AllocatorName = "native"
    memory: Bytes | None = None
    repair: Repair = "window"


@final
class Placement:
    """The block of memory of each resident storage on a simulated device.

    Attributes:
        device: The settings of the device.
        allocator: The state of the device's allocator.
        repairs: How often storages were evicted because free memory was not contiguous.
        refusal: The last `NoRoom` that was raised because free memory was not contiguous.
    """

    def __init__(self, trace: Trace, device: Device) -> None:
        self.device = device
        self.allocator: CachingAllocator = _ALLOCATORS[device.allocator](device.memory)
        self.repairs = 0
        self.refusal: NoRoom | None = None
        self._trace = trace
        self._blocks: dict[StorageId, Block] = {}
        self._owner: dict[Block, StorageId] = {}

    def follow(self, actions: Iterable[Action], engine: Engine) -> Iterator[Action]:
        """Yield the actions, and before each action the evictions that its allocations need.

        If nothing is left to evict, `NoRoom` is thrown into the generator `actions`. The engine
        then tries the event again with as little memory in use as possible.

        Args:
            actions: The actions of one event, from the engine.
            engine: The engine that yields the actions.

        Raises:
            NoRoom: The second attempt of the engine fails as well.
        """
        # Actions that allocate always come from a generator of the engine, never from a list.
        coming = cast("Generator[Action]", iter(actions))
        action = next(coming, None)
        while action is not None:
            try:
                yield from self._place(action, engine)
            except NoRoom as error:
                action = coming.throw(error)
                continue
            yield action
            action = next(coming, None)

    @property
    def storages(self) -> set[StorageId]:
        """The storages that have a block of memory at the moment."""
        return {*self._blocks}

    def check(self) -> None:
        """Assert that storages and blocks refer to each other, and that their bytes add up."""
        self.allocator.check()
        assert self._owner == {block: storage for storage, block in self._blocks.items()}
        assert self.allocator.allocated == sum(block.nbytes for block in self._owner)

    def _place(self, action: Action, engine: Engine) -> Iterator[Action]:
        """Allocate or free the blocks of one action, and yield the evictions that this needs."""
        match action:
            case Compute(op, in_place):
                yield from self._compute(op, in_place, engine)
            case SwapIn(storage):
                (block,) = yield from self._allocate([self._trace.storages[storage]], engine)
                self._keep(storage, block)
            case Free(storage) | SwapOut(storage, keep=False):
                if storage in self._blocks:
                    self._return(self._lose(storage))
            case SwapOut() | Discard():
                pass

    def _compute(self, op_id: int, in_place: bool, engine: Engine) -> Iterator[Action]:
        """Allocate results and workspace of an operator, then free the workspace."""
        op, trace = self._trace.ops[op_id], self._trace
        lent = {
            trace.values[output]: trace.values[source]
            for output, source in (op.overwrites if in_place else ())
        }
        fresh = [storage for storage in trace.new_storages(op) if storage not in lent]
        sizes = [trace.storages[storage] for storage in fresh]
        *blocks, workspace = yield from self._allocate([*sizes, op.workspace], engine)
        for storage, block in zip(fresh, blocks, strict=True):
            if storage in self._blocks:  # A result that is resident already keeps its block.
                self._return(block)
            else:
                self._keep(storage, block)
        self._return(workspace)
        for storage, source in lent.items():
            if source in self._blocks:
                self._keep(storage, self._lose(source))

    def _keep(self, storage: StorageId, block: Block | None) -> None:
        if block is not None:
            self._blocks[storage] = block
            self._owner[block] = storage

    def _lose(self, storage: StorageId) -> Block:
        block = self._blocks.pop(storage)
        del self._owner[block]
        return block

    def _return(self, block: Block | None) -> None:
        if block is not None:
            self.allocator.free(block)

    def _allocate(
        self, sizes: Iterable[Bytes], engine: Engine
    ) -> Generator[Action, None, list[Block | None]]:
        """Allocate one block for each size, and evict if necessary.

        Returns:
            One block for each size; None for a size of 0.

        Raises:
            NoRoom: A block cannot be allocated. The blocks before it are freed.
        """
        found: list[Block | None] = []
        subject = engine.subject
        for nbytes in sizes:
            block = self.allocator.allocate(nbytes) if nbytes else None
            while nbytes and block is None:
                before = len(self._owner)
                yield from self.follow(self._repair(nbytes, engine), engine)
                block = self.allocator.allocate(nbytes)
                if block is None and len(self._owner) == before:
                    for other in found:
                        self._return(other)
                    self.refusal = self._no_room(nbytes, subject)
                    raise self.refusal
            found.append(block)
        return found

    def _repair(self, nbytes: Bytes, engine: Engine) -> Iterator[Action]:
        """Evict storages, because `nbytes` contiguous bytes are not free.

        With the setting "window", the cheapest neighbors in memory are evicted. If there are none,
        or with the setting "score", the storage that the policy chooses is evicted.
        """
        self.repairs += 1
        victims = self._neighbors(nbytes, engine) if self.device.repair == "window" else []
        return engine.evict(victims) if victims else engine.shrink(engine.memory - 1)

    def _neighbors(self, nbytes: Bytes, engine: Engine) -> list[Storage]:
        """Return the cheapest storages whose eviction makes `nbytes` contiguous bytes free.

        The list is empty if no evictions free that many contiguous bytes.
        """
        by_id = {storage.id: storage for storage in engine.storages}

        @cache
        def loss(block: Block) -> float | None:
            storage = by_id.get(self._owner.get(block, _NOBODY))
            return None if storage is None else engine.loss(storage)

        return [by_id[self._owner[block]] for block in self.allocator.cheapest(nbytes, loss)]

    def _no_room(self, nbytes: Bytes, subject: Storage | Call | None) -> NoRoom:
        call = subject if isinstance(subject, Call) else None
        return NoRoom(nbytes, self.allocator.allocated, self.device.memory or 0, call)
