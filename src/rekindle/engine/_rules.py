"""Define the settings of the engine that are independent of its policy.

They decide how the engine treats dead storages (storages that the program cannot reach any more),
how long it may recompute, and whether it imitates the simulator of the DTR paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, final

from rekindle._types import Nanoseconds


@final
@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of the engine that no policy decides. The defaults are right for real runs.

    Attributes:
        dead: The treatment of a storage that the program cannot reach any more (DTR paper, section
            2 and appendix C).
            "evict": evict the storage at once. It may be recomputed if others need it.
            "ignore": do nothing. The storage stays a candidate as if it were reachable.
            "banish": free the storage for good as soon as no evicted storage needs it. Values made
            from it can then never be evicted.
        recompute_limit: Raise `Thrashed` once recomputation took longer than this (ns). None: no
            limit.
        quirks: Imitate the DTR paper's own simulator, to reproduce its figures. In that simulator:
            - Dead storages and dead sources stay in the graph for good, as evicted neighbors.
            - Outputs of a call in progress count as evicted until the call has run.
            - Groups of evicted neighbors lose more cost than they got (`Classes` in `policies`).
            - Storages of 0 bytes are evicted, too.
            - If all storages are locked, the first attempt is the last.
            - Banishing a storage does not banish its parents.
            - Reading a dead storage does not count as an access.
    """

    dead: Literal["evict", "ignore", "banish"] = "evict"
    recompute_limit: Nanoseconds | None = None
    quirks: bool = False


RIGHT: Final = Rules()
"""The settings of the engine when it runs a PyTorch program."""
