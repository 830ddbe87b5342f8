"""Rules of the engine that are not the policy's: dead storages, limits, compatibility."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, final

from rekindle._types import Nanoseconds


@final
@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of the engine that no policy decides. The defaults are right for real runs.

    Attributes:
        dead: The treatment of unreachable storages (DTR paper, section 2 and appendix C).
            "evict": evict it at once. It may be recomputed if others need it.
            "ignore": nothing. It stays a candidate as if it were reachable.
            "banish": free it for good as soon as nothing evicted needs it. Values made from it can
            then never be evicted.
        recompute_limit: Raise `Thrashed` once recomputation took longer than this (ns). None: no
            limit.
        quirks: Imitate the DTR paper's own simulator, to reproduce its figures. The code comments
            on each place. In that simulator:
            - Dead storages and dead sources stay in the graph for good, as evicted neighbors.
            - Outputs of a call in progress count as evicted until the call has run.
            - Classes of evicted storages lose more cost than they got (`Classes` in `policies`).
            - Storages of 0 bytes are evicted, too.
            - If all storages are locked, the first attempt is the last.
            - Banishing a storage does not banish its parents.
            - Reading a dead storage does not count as an access.
    """

    dead: Literal["evict", "ignore", "banish"] = "evict"
    recompute_limit: Nanoseconds | None = None
    quirks: bool = False


RIGHT: Final = Rules()
"""The rules of real runs."""
