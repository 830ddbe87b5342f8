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
    """Let go the memory of a storage; its values can be had again only by computing them."""

    storage: StorageId


Action = Compute | Free
