"""How the engine treats dead storages, when it gives up, and whose mistakes it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from rekindle._types import Nanoseconds


@final
@dataclass(frozen=True, slots=True)
class Rules:
    """What is not for a policy to decide. The defaults are what is right for a real run.

    banish: a dead storage that no evicted one needs is freed for good, and what was made from it
        can then never be let go (DTR paper, appendix C.4). Otherwise it is evicted at once and may
        be recomputed for others.
    recompute_limit: `Thrashed` is raised once recomputation took longer than this.
    quirks: as the DTR paper's own simulator does it, to reproduce its figures. Each place that asks
        for it says what is odd there:
        sources stay for good, also when nobody can ask for them;
        dead storages stay in the graph for good, and count as evicted neighbors;
        so do the outputs of a call that has not run yet;
        storages of no bytes are let go too;
        when all is locked the first attempt is the last;
        a banished storage does not take along what only it needed.
    """

    banish: bool = False
    recompute_limit: Nanoseconds | None = None
    quirks: bool = False
