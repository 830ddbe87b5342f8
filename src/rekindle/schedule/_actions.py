"""Define the actions of schedules.

Planners and the engine produce actions; the verifier, the simulator and the runtime consume them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle._types import OpId, StorageId


@final
@dataclass(frozen=True, slots=True)
class Compute:
    """Run an operator: all its outputs become resident, and outputs already resident stay as is.

    With `in_place` the outputs take over the memory of the storages that the operator overwrites;
    those are not resident afterwards. Without it the operator writes new memory.
    """

    op: OpId
    in_place: bool = False


@final
@dataclass(frozen=True, slots=True)
class Free:
    """Evict or free a storage. A copy on the host, if there is one, stays there."""

    storage: StorageId


@final
@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy a resident storage to the host, where it has no copy yet, and evict it.

    With `keep` the storage stays resident, so that a later `Free` need not wait for the copy.
    """

    storage: StorageId
    keep: bool = False


@final
@dataclass(frozen=True, slots=True)
class SwapIn:
    """Restore a storage from its copy on the host, with all views that were made of it so far.

    The copy stays on the host. The contents of a storage never change, so a later `Free` can evict
    the storage again without a transfer.
    """

    storage: StorageId


@final
@dataclass(frozen=True, slots=True)
class Discard:
    """Free the copy of a storage on the host."""

    storage: StorageId


Action = Compute | Free | SwapOut | SwapIn | Discard
