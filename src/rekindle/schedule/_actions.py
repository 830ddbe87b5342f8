"""What to do: the one vocabulary that planners and the engine produce and everything consumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle._types import OpId, StorageId


@final
@dataclass(frozen=True, slots=True)
class Compute:
    """Run an operator: all its outputs become resident, those already resident are kept as is.

    With `in_place` the storages that the operator overwrites lend their memory and are gone
    afterwards; without it the operator writes fresh memory.
    """

    op: OpId
    in_place: bool = False


@final
@dataclass(frozen=True, slots=True)
class Free:
    """Let go the memory of a storage. A copy on the host, if there is one, stays there."""

    storage: StorageId


@final
@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy a resident storage to the host, where it has no copy yet, and let go its memory.

    With `keep` its memory stays, so that a later `Free` need not wait for the copy.
    """

    storage: StorageId
    keep: bool = False


@final
@dataclass(frozen=True, slots=True)
class SwapIn:
    """Bring a storage back from its copy on the host, with all views that were made of it so far.

    The copy stays: what is in a storage never changes, so `Free` lets go of it a second time
    without a transfer.
    """

    storage: StorageId


@final
@dataclass(frozen=True, slots=True)
class Discard:
    """Let go the copy of a storage on the host."""

    storage: StorageId


Action = Compute | Free | SwapOut | SwapIn | Discard
