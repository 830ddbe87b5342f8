"""The torch side of an engine's storage, and the table that finds it from a tensor.

A `torch.UntypedStorage` lives as long as a tensor or its Python object does. So the runtime owns
memory by keeping that object, lets it go by dropping it, and learns from a weak reference to it
when the last tensor is gone. `torch._C._storage_Use_Count` is 1 when nobody but the object is left.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar, final

import torch
from torch import Tensor

from rekindle._types import Bytes
from rekindle.engine import Call, Storage
from rekindle.pytorch.devices import accelerator
from rekindle.pytorch.tensors._geometry import Geometry, is_exotic
from rekindle.pytorch.tensors._private import privately

use_count: Callable[[int], int] = torch._C._storage_Use_Count  # type: ignore[attr-defined]

# What is special about the content of a memory, so that reading it needs a second look.
EXOTIC = 1  #: quantized, without memory, ...: an alias cannot be rebuilt from its geometry
UNWRITTEN = 2  #: made by `empty`, and no operator has written to it
ZEROED = 4  #: made by `zeros`, and no operator has written to it
#: Either: kernels that nobody saw may have written to it all the same (R4).
UNSEEN = UNWRITTEN | ZEROED
COUNTERS = (
    8  #: its aliases have version counters of their own, as the parts that `unsafe_chunk` makes
)
NOTICED = 16  #: and a write moved the one of handles that were there before
FOREIGN = 32  #: others than PyTorch may write there, and nobody will notice


class Died(Exception):
    """The memory of a value that counts as being there is not: it died a moment ago, by garbage
    collection or in another thread, and nobody has acted on it."""


@final
class Memory:
    """Where an engine's storage lives. Hangs on `Storage.payload`."""

    __slots__ = (
        "alias",
        "aliased",
        "checksum",
        "copy",
        "flags",
        "origin",
        "overwritten",
        "owned",
        "returnable",
        "size",
        "strays",
        "successor",
        "version",
        "watch",
        "witness",
    )

    def __init__(self) -> None:
        #: Kept to keep the memory; None when the program alone keeps it, or when it is evicted.
        self.owned: torch.UntypedStorage | None = None
        #: A tensor in memory that is owned, as it was saved last: to copy its head costs a tenth of
        #: building one anew.
        self.alias: Tensor | None = None
        #: The geometry of that alias.
        self.aliased: Geometry | None = None
        #: Dies with the memory, and knows its address; None without memory.
        self.watch: Watch | None = None
        #: A tensor of the program that shares its version counter with all its aliases.
        self.origin: weakref.ref[Tensor] | None = None
        #: Of that tensor when the content was last known to be this value; negative: not known.
        self.version = 0
        #: Has that tensor's version counter once handles depend on it, for it may die before them.
        self.witness: Tensor | None = None
        #: Its version counter tells of other memory as well.
        self.strays = False
        self.flags = 0
        #: Numbers that an operator made, and nothing reads but operators: they may go while
        #: variables hold them.
        self.returnable = False
        #: Of foreign weights, when recipes began to read them.
        self.checksum: int | None = None
        #: What recipes read in the place of foreign memory, as it was last.
        self.copy: Storage | None = None
        #: Bytes of the memory, wherever it is: those of another device do not count.
        self.size: Bytes = 0
        #: The program wrote another value here, so that this one may no longer be asked for.
        self.overwritten = False
        #: The storage whose value now lives where this one did, unnoticed by version counters.
        self.successor: Storage | None = None

    def describe(self, tensor: Tensor) -> None:
        """`tensor` is how the program has it."""
        origin = tensor if tensor._base is None else tensor._base
        self.origin = weakref.ref(origin)
        self.version = version_of(origin)
        if is_exotic(tensor):
            self.flags |= EXOTIC

    def home(self) -> torch.UntypedStorage:
        """The torch storage of a value that is in memory, whoever keeps it. Raises `Died`."""
        home = self.owned
        if home is None and self.watch is not None:
            home = self.watch()
        if home is None:
            raise Died("a value that should be in memory is not; please report this")
        return home

    def disown(self) -> None:
        """The memory goes when the program does not keep it."""
        self.owned = self.alias = None

    def program_tensor(self) -> Tensor | None:
        """`origin`, if the program still has it."""
        return self.origin() if self.origin is not None else None

    def program_tensor_is_at(self, home: torch.UntypedStorage) -> bool:
        """Whether its version counter tells of `home`: not after `x.data = y`."""
        origin = self.program_tensor()
        return origin is None or origin.untyped_storage()._cdata == home._cdata

    def counted(self) -> Tensor | None:
        """What has the version counter that handles depend on, if anything is left that has."""
        return self.witness if self.witness is not None else self.program_tensor()

    def current_version(self) -> int:
        """That version counter now; negative if no tensor of the program is left to tell."""
        origin = self.counted()
        return -1 if origin is None else version_of(origin)


def whole(home: torch.UntypedStorage) -> Tensor:
    """The bytes of `home` as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=home.device).set_(home)  # type: ignore[call-overload]


def is_foreign(home: torch.UntypedStorage) -> bool:
    """Whether others than PyTorch may write there: NumPy, another process, who fills a buffer.

    What PyTorch did not allocate cannot be resized, nor what it lent to NumPy.
    """
    if not home.resizable():
        return True
    if home.device.type != "cpu":
        return False
    if home.is_shared():
        return True
    if not accelerator.IS_BUILT:
        return False
    with privately():
        return whole(home).is_pinned()  # as `home.is_pinned()`, where torch 2.10 warns of itself


def unread(storage: Storage | None) -> bool:
    """Whether the program may write there and nothing has to be saved first or noted: no recipe
    reads or made it, its content is nothing special, and its handles will notice (R4, R7)."""
    if storage is None:
        return True
    memory: Memory = storage.payload
    if memory.flags or storage.replayable or storage.consumers:
        return False
    return not storage.references or memory.witness is not None


def site(storage: Storage) -> str:
    """The operator that made `storage`, for messages."""
    return storage.makers[0].name if storage.makers else "a tensor"


def version_of(tensor: Tensor) -> int:
    """The version counter; negative for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


def share_version(origin: Tensor, target: Tensor) -> bool:
    """Whether a write through `target` moves the version counter of `origin`.

    Views have the counter of their base, `.data` has its own. `detach()` shares it and shows in no
    attribute: a step of the one that moves the other does.
    """
    if target is origin or target._base is origin:
        return True
    if origin.is_inference() or target.is_inference():  # there is no counter to share
        return False
    version, before = target._version, origin._version
    torch._C._increment_version([target])  # type: ignore[attr-defined]
    shared = origin._version != before
    torch._C._autograd._unsafe_set_version_counter((target,), (version,))  # type: ignore[attr-defined]
    return shared


@final
class Watch(weakref.ref[torch.UntypedStorage]):
    """Dies with the memory at one address, and knows what lives there.

    Memory that no recipe reads or makes is only counted: it has no storage of the engine.
    """

    __slots__ = ("address", "maker", "nbytes", "storage")

    address: int
    storage: Storage | None
    nbytes: Bytes  #: as counted, if it is only counted
    maker: str  #: the name of the operator, likewise


_Dead = TypeVar("_Dead")


@final
class Obituaries(deque[_Dead]):
    """What died, oldest first, until somebody acts on it."""

    #: Called for each death once the context is over: no operator comes by any more to look.
    late: Callable[[], None] | None = None

    def announce(self, dead: _Dead) -> None:
        """May come at any time and in any thread, amid anything."""
        self.append(dead)
        if self.late is not None:
            self.late()


class Emptying(Protocol):
    """Who lets go of memory under the program's own tensors, and puts it back."""

    def emptied(self, storage: Storage) -> bool:
        """Whether the program keeps `storage`; then its memory is gone."""
        ...

    def refilled(self, storage: Storage, home: torch.UntypedStorage) -> bool:
        """Whether the program waits for `storage`; then it has what was in `home`."""
        ...

    def dropped(self) -> None:
        """The program no longer waits for one of those."""
        ...


@final
class Table:
    """Finds the engine's storage of a tensor; collects deaths until it is safe to act on them."""

    def __init__(self) -> None:
        self.deaths: Obituaries[Watch] = Obituaries()
        self.released: Obituaries[Storage] = Obituaries()  #: of handles: what they stood for
        self.watches: dict[int, Watch] = {}  #: by address
        self.shells: Emptying | None = None  #: if what the program holds may be let go

    def watch_at(self, address: int) -> Watch | None:
        """What is known of the memory there; not of what died just now, and whose place another
        took before anybody could act on the death."""
        watch = self.watches.get(address)
        return None if watch is None or watch() is None else watch

    def settle(self, storage: Storage, home: torch.UntypedStorage, address: int) -> None:
        """`storage` lives in `home` from now on."""
        self.watches[address] = watch = Watch(home, self.deaths.announce)
        watch.address = address
        watch.storage = storage
        memory: Memory = storage.payload
        memory.watch = watch
        memory.size = home.nbytes()

    def count(self, home: torch.UntypedStorage, address: int, nbytes: Bytes, maker: str) -> None:
        """Something that is only counted lives in `home` from now on."""
        self.watches[address] = watch = Watch(home, self.deaths.announce)
        watch.address = address
        watch.storage = None
        watch.nbytes = nbytes
        watch.maker = maker

    def leave(self, watch: Watch) -> None:
        """Nothing lives there any more, but for what may have taken the place meanwhile."""
        if self.watches.get(watch.address) is watch:
            del self.watches[watch.address]

    def only_counted(self) -> Iterator[Watch]:
        """The memory that has no storage of the engine."""
        return (watch for watch in self.watches.values() if watch.storage is None)

    def succeed(self, old: Storage, new: Storage) -> None:
        """The home of `old` now holds the value of `new`."""
        before: Memory = old.payload
        after: Memory = new.payload
        after.watch, before.watch = before.watch, None
        after.owned = before.owned
        after.size = before.size
        before.disown()
        if after.watch is not None:
            after.watch.storage = new

    def vacate(self, storage: Storage) -> None:
        """`storage` has no home any more; the memory goes when nobody else keeps it."""
        memory: Memory = storage.payload
        if self.shells is not None and self.shells.emptied(storage):
            return
        if memory.watch is not None:
            self.leave(memory.watch)
            memory.watch = None
        memory.disown()

    def returned(self, call: Call, tensors: list[Tensor]) -> None:
        """`call` ran again and made `tensors`: what was evicted is in their memory now."""
        for tensor, storage in zip(tensors, call.made, strict=True):
            home = tensor.untyped_storage()
            if not storage.resident and not self.refill(storage, home):
                memory: Memory = storage.payload
                memory.owned = home
                memory.origin = None
                memory.version = 0
                self.settle(storage, home, home._cdata)

    def written_over(self, call: Call) -> None:
        """`call` ran again in the memory of what it overwrites."""
        for output, source in call.overwrites:
            if self.refill(output.storage, source.storage.payload.home()):
                self.vacate(source.storage)
                continue
            self.succeed(source.storage, output.storage)
            output.storage.payload.origin = None  # the program's tensor is elsewhere
            output.storage.payload.version = 0

    def refill(self, storage: Storage, home: torch.UntypedStorage) -> bool:
        """The program's own tensors have what is in `home`, if they wait for `storage`."""
        return self.shells is not None and self.shells.refilled(storage, home)

    def is_held(self, storage: Storage) -> bool:
        """Whether the program keeps the memory of `storage` beside the runtime.

        Not if it died a moment ago and nobody has acted on it: others may be at that address.
        """
        memory: Memory = storage.payload
        assert memory.watch is not None
        if memory.watch() is None:
            return False
        return use_count(memory.watch.address) > (1 if memory.alias is None else 2)
