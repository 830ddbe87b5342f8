"""How the engine treats dead storages, when it gives up, and whose mistakes it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, final

from rekindle._types import Nanoseconds


@final
@dataclass(frozen=True, slots=True)
class Rules:
    """What is not for a policy to decide. The defaults are what is right for a real run.

    dead: what happens to a storage that nobody can ask for (DTR paper, section 2 and appendix C):
        "evict": it is evicted at once, and may be recomputed if others need it.
        "ignore": nothing; it stays a candidate as if it were wanted.
        "banish": it is freed for good as soon as nothing evicted needs it. What was made from it
        can then never be let go.
    recompute_limit: `Thrashed` is raised once recomputation took longer than this.
    quirks: as the DTR paper's own simulator does it, to reproduce its figures. Each place that asks
        for it says what is odd there:
        dead storages and dead sources stay in the graph for good, as evicted neighbors;
        so do, until it has run, the outputs of a call in progress, and classes of evicted storages
        lose more than they got (`Classes` in policies);
        storages of no bytes are let go too;
        when all is locked the first attempt is the last;
        banishing a storage does not banish what only it needed, and reading what is dead does not
        count as an access.
    """

    dead: Literal["evict", "ignore", "banish"] = "evict"
    recompute_limit: Nanoseconds | None = None
    quirks: bool = False


RIGHT: Final = Rules()
