"""Turn the native core's numbers about the holders of memory into a `Snapshot`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from rekindle._types import Bytes, Nanoseconds, OpId, StorageId
from rekindle.pytorch.native._higher import shown_name
from rekindle.pytorch.native._module import HolderNumbers, OwnedNumbers, SnapshotNumbers
from rekindle.pytorch.online import (
    CATEGORIES,
    GRADIENTS,
    IN_USE,
    INPUTS,
    KEPT,
    OPTIMIZER,
    PARAMETERS,
    PROGRAM,
    SAVED,
    UNRECORDED,
    WAITING,
    Holder,
    Snapshot,
    line_in_words,
)

# Flags of a storage and kinds of owned memory, as in `native/memory/observers/snapshot.h`.
(
    _REPLAYABLE, _PINNED, _HELD, _REFERENCED, _CONSUMED, _PARAMETER, _COUNTED, _UNPACKED, _NAMED,
    _UNNAMED, _BACKWARD,
) = (1 << bit for bit in range(11))  # fmt: skip
_KEPT: Final = _REFERENCED | _CONSUMED | _PINNED
_KINDS: Final = (INPUTS, PARAMETERS, GRADIENTS, OPTIMIZER)


class _Holder(NamedTuple):
    """One storage with its size, flags and maker, as the native core reports it."""

    nbytes: Bytes
    allocation: int
    flags: int
    site: str
    parameter: int
    storage: int
    maker: int

    def category(self, owned_at: Mapping[int, tuple[str, int]]) -> tuple[str, int]:
        """Return the category, and the id of the parameter that the memory belongs to, or 0."""
        flags = self.flags
        if self.allocation in owned_at:
            return owned_at[self.allocation]
        if flags & _COUNTED:
            return self._counted(), 0
        if flags & _REPLAYABLE and not flags & _PINNED:
            if flags & _UNPACKED:
                return IN_USE, 0
            if not flags & _HELD:
                return SAVED, 0
            return PROGRAM if flags & _REFERENCED else self._held(), 0
        if flags & _PARAMETER:
            return PARAMETERS, self.parameter
        if self.site == "source":
            return INPUTS, 0
        return KEPT if flags & _KEPT else self._held(), 0

    def _counted(self) -> str:
        """Return the category of memory without a record."""
        if self.flags & _REFERENCED:
            return SAVED
        if self.flags & _BACKWARD:
            return WAITING
        return UNRECORDED if self.site else INPUTS

    def _held(self) -> str:
        """Return the category of a value that autograd did not save."""
        if self.flags & _NAMED:
            return PROGRAM
        if self.flags & _BACKWARD:
            return WAITING
        return IN_USE if self.flags & _UNNAMED else PROGRAM


class _Owned(NamedTuple):
    """One allocation that is known to be an input, parameter, gradient or optimizer state."""

    allocation: int
    kind: int
    parameter: int


class _Snapshot(NamedTuple):
    """A snapshot of memory as the native core returns it, in numbers."""

    memory: Bytes
    clock: Nanoseconds
    resident: Bytes
    cached: Bytes
    line: tuple[str, int, str, int]
    holders: Iterable[HolderNumbers]
    owned: Iterable[OwnedNumbers]


def bytes_saved(noted: SnapshotNumbers) -> Bytes:
    """Return the bytes that autograd saved and that can be evicted."""
    return sum(
        each.nbytes
        for each in (_Holder(*each) for each in _Snapshot(*noted).holders)
        if each.flags & _REPLAYABLE and each.flags & _REFERENCED and not each.flags & _PINNED
    )


def in_words(noted: SnapshotNumbers) -> Snapshot:
    """Convert a snapshot of the core to a `Snapshot`, with categories, names, the source line."""
    memory, clock, resident, cached, line, holders, owned = _Snapshot(*noted)
    owned_at = {
        each.allocation: (_KINDS[each.kind], each.parameter)
        for each in (_Owned(*each) for each in owned)
    }
    categories: Counter[str] = Counter()
    sites: Counter[str] = Counter()
    found: dict[StorageId, Holder] = {}
    for each in sorted((_Holder(*each) for each in holders), key=lambda each: each.allocation):
        category, parameter = each.category(owned_at)
        categories[category] += each.nbytes
        maker = OpId(each.maker) if each.maker >= 0 else None
        # a storage that the engine does not know gets a negative number
        storage = StorageId(each.storage if each.storage >= 0 else -each.allocation)
        found[storage] = Holder(category, each.nbytes, maker, parameter)
        if category in (SAVED, PROGRAM, KEPT):
            sites[shown_name(each.site)] += each.nbytes
    ordered = {name: categories[name] for name in CATEGORIES if categories[name]}
    where, most = line_in_words(*line), sites.most_common(5)
    return Snapshot(memory, clock, where, ordered, most, found, resident, cached)
