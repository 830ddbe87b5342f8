"""Define the actions of schedules, and `Schedule`.

Planners and the engine produce actions; the verifier, the simulator and the runtime consume them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle._types import OpId, StorageId


@final
@dataclass(frozen=True, slots=True)
class Compute:
    """Run an operator. All its outputs become resident; outputs already resident do not change.

    With `in_place` the outputs take over the memory of the storages that the operator overwrites;
    these storages are not resident afterwards. Without `in_place` the operator writes new memory.
    """

    op: OpId
    in_place: bool = False


@final
@dataclass(frozen=True, slots=True)
class Free:
    """Evict or free a storage. Its copy on the host, if there is one, stays on the host."""

    storage: StorageId


@final
@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy a resident storage to the host, and evict it. The host must have no copy yet.

    With `keep` the storage stays resident. A later `Free` can evict it without waiting for the
    copy.
    """

    storage: StorageId
    keep: bool = False


@final
@dataclass(frozen=True, slots=True)
class SwapIn:
    """Restore a storage, and all its views that were made so far, from its copy on the host.

    The copy stays on the host. In a trace the contents of a storage never change, so a later `Free`
    can evict the storage again without another transfer.
    """

    storage: StorageId


@final
@dataclass(frozen=True, slots=True)
class Discard:
    """Free the copy of a storage on the host."""

    storage: StorageId


Action = Compute | Free | SwapOut | SwapIn | Discard


@final
@dataclass(frozen=True, slots=True)
class Schedule:
    """Actions in order that run one trace. `verify(trace, schedule, budget)` checks them."""

    actions: tuple[Action, ...]
    made_by: str = ""
